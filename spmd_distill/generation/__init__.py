"""Continuing prompts on the mesh that a run trains on: sharded, with a cache of keys and values, in one program."""

from spmd_distill.generation.run import generate as generate
from spmd_distill.generation.sampling import GREEDY as GREEDY
from spmd_distill.generation.sampling import Sampling as Sampling
from spmd_distill.generation.text import Message as Message
from spmd_distill.generation.text import end_ids as end_ids
from spmd_distill.generation.text import generate_text as generate_text
