"""Which layers each pipeline stage holds.

The output head is a matrix product over the whole vocabulary and can cost as much as several layers; a
split that only counts layers leaves the last stage behind. Costs are forward FLOPs per token.
"""

from __future__ import annotations

from meshwright.config.layout import Layout
from meshwright.config.model import ModelConfig

# The embedding is a table look-up, but its stage also does the scatter of its gradient and the input's
# dropout and positions: memory traffic of a few hidden-size vectors a token. Counted as this share of a layer.
EMBEDDING_SHARE = 0.05


def layers_of_stages(model: ModelConfig, layout: Layout, seq_len: int) -> list[range]:
    """Layers of each virtual stage, in model order: `pp x vpp` ranges, none empty.

    Virtual stage `i` runs on pipeline rank `i % pp` as its chunk `i // pp`. The dearest stage is made as
    cheap as possible: layers go one by one to the stage that is cheapest so far, the first stage starting
    with the embedding's cost and the last with the head's.
    """
    stages = layout.chunks
    layer_flops = 2 * model.layer_parameters + 2 * model.hidden * seq_len
    cost = [0.0] * stages
    cost[0] += EMBEDDING_SHARE
    cost[-1] += 2 * model.embedding_parameters / layer_flops
    counts = [1] * stages
    for _ in range(model.layers - stages):
        cheapest = min(range(stages), key=lambda stage: (cost[stage] + counts[stage], stage))
        counts[cheapest] += 1
    ranges, first = [], 0
    for count in counts:
        ranges.append(range(first, first + count))
        first += count
    return ranges
