"""Ops that run whole on every rank, each with the reason; `explain` prints it."""

import operator
from typing import Any

import torch

from tpcompile.ops.equations import aten

RANDOM = "draws random numbers, which must be the same on all ranks; a reader splits them for free"
POSITIONS = "its values depend on their position; it is cheap, and a reader splits it for free"
DATA = "the size of its result depends on the data"
RECURRENT = "its steps mix all hidden units, so every step would need a collective"
SCALAR = "computes no tensor"

_BY_REASON = {
    RANDOM: """
        bernoulli bernoulli.p rand rand_like randn randn_like randint randint.low randint_like
        randperm normal_ uniform_ exponential_ normal.Tensor_float normal.float_Tensor
        normal.Tensor_Tensor normal.float_float multinomial native_dropout feature_dropout
        alpha_dropout dropout_ bernoulli_.float bernoulli_.Tensor rrelu""",
    POSITIONS: """
        arange arange.start arange.start_step linspace logspace eye eye.m scalar_tensor
        tril_indices triu_indices""",
    DATA: """
        nonzero nonzero_numpy where masked_select unique_consecutive _unique2 bincount
        repeat_interleave.Tensor repeat_interleave.self_Tensor""",
    RECURRENT: "lstm.input lstm.data gru.input gru.data rnn_tanh.input rnn_relu.input",
    SCALAR: """
        sym_size.int sym_numel sym_stride.int _assert_scalar _assert_tensor_metadata item
        _local_scalar_dense is_nonzero equal""",
    "counts values over the whole tensor": "histc",
    "takes as many values of its source as its mask has before each place": """
        masked_scatter masked_scatter_""",
    "a mode of its reduction is not a sum": """
        scatter.reduce scatter_.reduce scatter_reduce.two scatter_reduce_.two scatter.value_reduce
        index_reduce""",
    "its strides say how storage is read, which a part of a tensor has otherwise": """
        as_strided as_strided_""",
    "mixes rows of the table by bags of unequal size": "embedding_bag",
    "a decomposition of whole matrices": """
        linalg_qr linalg_svd linalg_eigh linalg_inv_ex linalg_solve_ex linalg_cholesky_ex""",
}

REPLICATED: dict[Any, str] = {
    op: reason for reason, names in _BY_REASON.items() for op in aten(names)
} | {
    operator.getitem: "picks one output of an op; it follows that op",
    operator.ge: SCALAR,
    operator.le: SCALAR,
    torch.ops.higher_order.wrap_with_set_grad_enabled: "a region; its body is inlined before",
}
"""Op -> why it has no rule."""


def reason_for(op: Any) -> str:
    """Why a call of the op runs whole on every rank."""
    return REPLICATED.get(op, "no rule covers this call")
