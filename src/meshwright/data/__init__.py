"""Level 1: built-in data sets, a sampler over the global batch that resumes at the exact sample, and a prefetching loader."""

from meshwright.data.dataset import Dataset, is_instruction_file, load
from meshwright.data.loader import Loader
from meshwright.data.sampler import GlobalSampler

__all__ = ["Dataset", "GlobalSampler", "Loader", "is_instruction_file", "load"]
