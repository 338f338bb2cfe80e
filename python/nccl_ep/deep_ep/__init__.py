"""The interface of DeepEP over groups of this library: V1 (`Buffer`, `Config`, `EventOverlap`), V2 (`ElasticBuffer`,
`EPHandle`, `EventHandle`), and that of its branch `hybrid-ep` (`HybridEPBuffer`).

`import nccl_ep.deep_ep as deep_ep`, or install the package in python/deep-ep, whose name is `deep_ep`,
for programs that import that. What is served, and what is not: docs/guide/deepep.md.
"""

from nccl_ep.requirement import require_torch

require_torch("nccl_ep.deep_ep")

import torch

from nccl_ep import __version__
from nccl_ep.deep_ep import utils
from nccl_ep.deep_ep.buffer import Buffer, Config
from nccl_ep.deep_ep.elastic import ElasticBuffer, EPHandle
from nccl_ep.deep_ep.events import EventHandle, EventOverlap
from nccl_ep.deep_ep.hybrid import HybridEPBuffer

topk_idx_t = torch.int64

__all__ = ["Buffer", "Config", "EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap", "HybridEPBuffer",
           "__version__", "topk_idx_t", "utils"]
