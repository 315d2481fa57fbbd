"""Transformers of diffusers over the ranks of a group: ``parallelize(pipe.transformer)``, then run the pipeline."""

from .parallelize import Parallelized, parallelize

__all__ = ["Parallelized", "parallelize"]
