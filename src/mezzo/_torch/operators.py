"""Operators of torch without a public name, which graphs contain and results are made with.

Why: graph mode drops casts (`TO_COPY`) from graphs; export drops assertions about dtypes; an
operator of mezzo's must not return a view, so it reshapes by `unsafe_view`.
Releases: 2.11 to 2.15.
Without them: captured graphs keep casts that give nothing new; exported programs refuse
`auto_cast`.
"""

from __future__ import annotations

from typing import Any

import torch

TO_COPY: Any = torch.ops.aten._to_copy.default
"""A cast, a copy to another device, or both."""
ASSERT_TENSOR_METADATA: Any = torch.ops.aten._assert_tensor_metadata.default
unsafe_view: Any = torch.ops.aten._unsafe_view
"""A tensor in another shape; unlike `view`, autograd does not take the result for a view."""
