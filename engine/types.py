"""Old address of the engine's nouns; new code imports them from where they live."""

from kvasir.engine.blocks import (
    BlockId as BlockId,
)
from kvasir.engine.blocks import (
    KVLayout as KVLayout,
)
from kvasir.engine.blocks import (
    num_blocks_for as num_blocks_for,
)
from kvasir.engine.blocks import (
    slot_mapping as slot_mapping,
)
from kvasir.engine.limits import (
    Limits as Limits,
)
from kvasir.engine.request import (
    FinishReason as FinishReason,
)
from kvasir.engine.request import (
    Matcher as Matcher,
)
from kvasir.engine.request import (
    Phase as Phase,
)
from kvasir.engine.request import (
    Request as Request,
)
from kvasir.engine.request import (
    RequestId as RequestId,
)
from kvasir.engine.sampling_params import (
    SamplingParams as SamplingParams,
)
from kvasir.engine.step import (
    Admitted as Admitted,
)
from kvasir.engine.step import (
    Chunk as Chunk,
)
from kvasir.engine.step import (
    ComputedBlocks as ComputedBlocks,
)
from kvasir.engine.step import (
    Failed as Failed,
)
from kvasir.engine.step import (
    PositionLogprobs as PositionLogprobs,
)
from kvasir.engine.step import (
    PromptLogprobs as PromptLogprobs,
)
from kvasir.engine.step import (
    Sampled as Sampled,
)
from kvasir.engine.step import (
    SequenceOutput as SequenceOutput,
)
from kvasir.engine.step import (
    StepPlan as StepPlan,
)
from kvasir.engine.step import (
    StepResult as StepResult,
)
