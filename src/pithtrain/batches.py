"""Samples to this rank's micro-batches: which sequences, which part of them, and how many tokens count."""

import torch
from torch import Tensor

from pithtrain.data import Dataset
from pithtrain.ops.cross_entropy import IGNORE
from pithtrain.ops.parts import Part, chunks, to_device
from pithtrain.pipeline import MicroBatch
from pithtrain.spec import RunSpec
from pithtrain.world import World


def read_batches(
    dataset: Dataset | None, spec: RunSpec, world: World, samples: int, end: int | None = None
) -> list[MicroBatch]:
    """This data rank's micro-batches of the step that begins after `samples` sequences.

    Micro-batch a of data rank d holds the sequences samples + (a * data_size + d) * mbs + [0, mbs): which sequences
    share a micro-batch does not depend on the mesh. A cp rank has its own chunks of them, tokens and labels on pipeline
    rank 0 alone, documents everywhere. Where `end` comes before the end of the step, there are only as many as reach
    it, on all ranks alike, and sequences from `end` on have no labels.
    """
    if dataset is None:
        return []
    mbs, length, cp = spec.training.micro_batch_size, spec.training.sequence_length, world.mesh.cp
    own, turn, count = chunks(length, cp, world.cp), world.data_size * mbs, spec.num_micro_batches
    batches: list[MicroBatch] = []
    for a in range(count if end is None else min(count, -(-(end - samples) // turn))):
        first = samples + a * turn + world.data_rank * mbs
        part = tokens = labels = None
        if dataset.document_mask:
            part = Part(mbs, length, world.device, cp, world.cp, dataset.documents(first, mbs))
        if world.pp == 0:
            whole = dataset.batch(first, mbs)  # labels are shifted before the cut
            if end is not None:
                whole[1][max(0, end - first) :] = IGNORE
            pair = (torch.from_numpy(x) for x in whole)
            tokens, labels = (to_device(torch.cat([x[:, c] for c in own], 1), world.device) for x in pair)
        batches.append(MicroBatch(tokens, labels, part))
    return batches


def valid_tokens(batches: list[MicroBatch], world: World) -> Tensor:
    """How many labels of this rank count, a float64 device scalar."""
    valid = torch.zeros((), dtype=torch.float64, device=world.device)
    for batch in batches:
        if batch.labels is not None:
            valid += (batch.labels != IGNORE).sum()
    return valid
