"""Transformers of diffusers over the ranks of a group: ``parallelize(pipe.transformer)``, then run the pipeline."""

from .parallelize import Parallelized, parallelize
from .plans import Plan, Split

__all__ = ["Parallelized", "Plan", "Split", "parallelize"]
