"""Imported by tests that compile: all of them get the same, scalar, kind of C++ kernel, which is quick to compile, and
share the header that Inductor precompiles for each kind. Each rank compiles by itself: there are as many as cores."""

from __future__ import annotations

import torch._inductor.config as inductor_config

inductor_config.cpp.simdlen = 1
inductor_config.compile_threads = 1
