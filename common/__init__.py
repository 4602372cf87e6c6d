import os

# We start processes, but never go on in a forked one. With this support, gRPC writes a line at each start.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
