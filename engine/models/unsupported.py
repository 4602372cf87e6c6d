"""The one error of a checkpoint that we cannot, or must not, serve."""


class UnsupportedModel(Exception):
    """The model cannot be served; the message names what stands in the way."""
