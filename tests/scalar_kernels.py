"""Imported by tests that compile: all of them get the same, scalar, kind of C++ kernel, which is quick to compile, and
share the header that Inductor precompiles for each kind."""

from __future__ import annotations

import torch._inductor.config as inductor_config

inductor_config.cpp.simdlen = 1
