"""The policy: its rules against an independent statement of them, its lists, its data forms."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mezzo.amp import OPERATOR_GROUPS, OPS, VARIANTS, Policy, auto_cast, operator_names, read_lists, resolve_name
from mezzo.amp._ops import WITHOUT_HALF_KERNEL

WITHOUT_OPERATOR = set(
    "tanh_shrink log_loss hsigmoid_loss margin_cross_entropy c_softmax_with_cross_entropy fused_feedforward "
    "c_softmax_with_multi_label_cross_entropy fused_rotary_position_embedding".split()
)
"""Names of the documents for which torch has no operator."""
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool]


def documented_rule(policy: Policy, variant: str, dtypes: list[torch.dtype]) -> torch.dtype | None:
    """Section a.2 of the notes on the AMP documents, word for word, plus 'fp32 inside' = the gray rule for the result."""
    if VARIANTS[variant].weights != "decide":
        dtypes = dtypes[:1]
    seen = [d for d in dtypes if d in (torch.float32, torch.float16, torch.bfloat16)]
    if not seen:
        return None
    if variant in WITHOUT_HALF_KERNEL:
        return torch.float32
    if variant in policy.white:
        return torch.float32 if policy.level == "OD" else policy.dtype  # OD: cast back, values unchanged
    if variant in policy.black:
        return torch.float32
    if policy.level == "OD":
        return torch.float32
    if policy.level == "O1" or policy.use_promote:
        return torch.float32 if torch.float32 in seen else policy.dtype
    return policy.dtype


POLICIES = st.builds(
    lambda level, half, promote, edits: Policy.create(
        level,
        half,
        custom_white_list=[n for n, white in edits.items() if white],
        custom_black_list=[n for n, white in edits.items() if not white],
        use_promote=promote,
    ),
    st.sampled_from(["OD", "O1", "O2"]),
    st.sampled_from(sorted(HALVES)),
    st.booleans(),
    st.dictionaries(st.sampled_from(sorted(VARIANTS)), st.booleans(), max_size=5),
)


@given(POLICIES, st.sampled_from(sorted(VARIANTS)), st.lists(st.sampled_from(DTYPES), max_size=4))
def test_decide_follows_the_documented_rule(policy: Policy, variant: str, dtypes: list[torch.dtype]) -> None:
    decision = policy.decide(variant, dtypes)
    assert decision.dtype is documented_rule(policy, variant, dtypes)
    assert decision.reason
    assert policy.decide(variant, dtypes) is decision  # remembered


@given(POLICIES)
def test_lists_never_overlap_and_equal_policies_are_equal(policy: Policy) -> None:
    assert not policy.white & policy.black
    assert not policy.inside & (policy.white | policy.black)
    twin = Policy(policy.level, policy.dtype, policy.white, policy.black, policy.inside, policy.use_promote)
    assert twin == policy
    assert hash(twin) == hash(policy)
    assert twin.digest == policy.digest


def test_o0_decides_nothing() -> None:
    assert Policy.create("O0", custom_white_list=["exp"]).decide("linear", [torch.float32]).reason == "auto_cast is off"


@pytest.mark.parametrize(
    ("level", "op", "dtypes", "reason"),
    [
        ("O1", "linear", [torch.float32], "white list"),
        ("O1", "exp", [torch.float16], "black list"),
        ("O1", "add", [torch.float16, torch.float32], "gray: promoted by a float32 input"),
        ("O1", "add", [torch.float16], "gray: no input is float32"),
        ("O2", "add", [torch.float32], "gray: promoted by a float32 input"),
        ("O2", "softmax", [torch.float16], "fp32 inside, no input is float32"),
        ("OD", "add", [torch.float16], "gray: only white operators are half at OD"),
        ("O1", "linalg_inv", [torch.float16], "no half kernel"),
        ("O1", "add", [torch.float64], "no input that can be cast (float64, integers and bools are left alone)"),
    ],
)
def test_the_reason_names_the_list_or_rule(level: str, op: str, dtypes: list[torch.dtype], reason: str) -> None:
    assert Policy.create(level).decide(op, dtypes).reason == reason


def test_custom_entries_are_named_as_such_and_black_wins_where_names_overlap() -> None:
    policy = Policy.create("O1", custom_white_list=["linear", "add"], custom_black_list=["matmul"])
    assert policy.decide("linear", [torch.float32]).reason == "custom black list"
    assert policy.decide("add", [torch.float32]).reason == "custom white list"


def test_batch_norm_looks_at_its_data_alone() -> None:
    policy = Policy.create("O1")
    assert policy.decide("batch_norm", [torch.float16, torch.float32, torch.float32]).dtype is torch.float16
    assert policy.decide("batch_norm", [torch.float32, torch.float16, torch.float16]).dtype is torch.float32


def test_unknown_names_get_the_nearest_one() -> None:
    with pytest.raises(ValueError, match=r"unknown operator 'elementwise_ad'; did you mean 'elementwise_add'\?"):
        Policy.create().decide("elementwise_ad", [torch.float32])
    with pytest.raises(ValueError, match="'log_loss' has no torch operator"):
        Policy.create().decide("log_loss", [torch.float32])


@given(st.text(min_size=1, max_size=12))
def test_any_other_text_is_an_unknown_name(text: str) -> None:
    if text in operator_names() or text.removeprefix("aten::") in OPS:
        return
    with pytest.raises(ValueError, match="unknown operator"):
        resolve_name(text)


def test_every_name_of_the_documents_is_understood() -> None:
    documents = (
        "conv2d einsum matmul matmul_v2 max_pool2d_with_index mul fused_gemm_epilogue fused_rotary_position_embedding "
        "flash_attn linear_v2 fake_quantize_dequantize_abs_max fake_quantize_dequantize_moving_average_abs_max "
        "fused_attention fused_feedforward tan acos asin sinh cosh atanh tanh_shrink erfinv exp expm1 log log10 log2 "
        "reciprocal rsqrt pow square reduce_sum mean reduce_mean reduce_prod cumprod cumsum dist pnorm frobenius_norm "
        "renorm group_norm layer_norm softmax softmin softplus log_softmax softmax_with_cross_entropy "
        "sigmoid_cross_entropy_with_logits c_softmax_with_cross_entropy cross_entropy cross_entropy2 nll_loss huber_loss "
        "triplet_margin_loss log_loss hsigmoid_loss margin_cross_entropy c_softmax_with_multi_label_cross_entropy "
        "linear_interp_v2 nearest_interp_v2 bilinear_interp_v2 bicubic_interp_v2 trilinear_interp_v2 lookup_table "
        "lookup_table_v2 scatter elementwise_add elementwise_pow depthwise_conv2d"
    )
    for name in documents.split():
        assert resolve_name(name) or name in WITHOUT_OPERATOR, name


def test_every_name_means_known_operators() -> None:
    assert set(OPERATOR_GROUPS) < set(operator_names())
    for name in operator_names():
        assert resolve_name(name) <= set(VARIANTS)
        assert bool(resolve_name(name)) != (name in WITHOUT_OPERATOR)


def test_exact_packet_names_mean_one_packet() -> None:
    assert resolve_name("aten::matmul") == {"matmul"}
    assert resolve_name("matmul") > {"matmul", "linear", "mm", "addmm", "bmm", "baddbmm", "einsum"}
    assert resolve_name("depthwise_conv2d") == {"conv2d.depthwise"}


@pytest.mark.parametrize("suffix", [".yml", ".json"])
def test_lists_come_from_a_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"lists{suffix}"
    path.write_text(json.dumps({"custom_white_list": ["elementwise_add"], "custom_black_list": ["linear"]}))
    policy = auto_cast(**read_lists(path)).policy
    assert policy == Policy.create(custom_white_list=["add"], custom_black_list=["linear"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "white: [exp]",
            "holds \\['white'\\]; allowed are the keys custom_white_list, custom_black_list, excluded_layers and half_layers",
        ),
        ("[exp]", "holds list; allowed"),
        ("custom_white_list: exp", "custom_white_list must be a list of operator names"),
        ("custom_white_list: [1]", "custom_white_list must be a list of operator names"),
        ("a: [", r"lists\.yml:1: not YAML"),
        ("!!python/object/apply:os.system [echo]", "os.system' is not used here"),
    ],
)
def test_a_bad_list_file_is_one_clear_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "lists.yml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_lists(path)
    assert "\n" not in str(caught.value)


def test_a_missing_list_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.yml: no such file"):
        read_lists(tmp_path / "none.yml")


def test_policies_print_as_data_and_differences() -> None:
    one, other = Policy.create("O1"), Policy.create("O1", "bfloat16", custom_white_list=["exp"])
    data = json.loads(json.dumps(one.to_dict()))
    assert data["level"] == "O1"
    assert "exp" in data["black"]
    assert one.diff(one) == ""
    assert one.diff(other).splitlines() == [
        "dtype: float16 -> bfloat16",
        "white: - fake_quantize_per_channel_affine",
        "white: - fake_quantize_per_tensor_affine",
        "white: + exp",
        "black: - exp",
    ]


def test_the_digest_is_the_same_in_every_process() -> None:
    """A literal: the digest is part of on-disk cache keys, so an accidental change of the default lists shows here."""
    assert Policy.create("O1").digest == Policy.create("o1", torch.float16).digest
    assert len({Policy.create(level, half).digest for level in ("OD", "O1", "O2") for half in HALVES}) == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("custom_white_list: [sofmax]", r"lists\.yml: unknown operator 'sofmax'; did you mean 'softmax'"),
        ("{custom_white_list: [exp], custom_black_list: [exp]}", r"lists\.yml: .*both hold 'exp'"),
    ],
)
def test_wrong_names_in_a_list_file_are_found_when_it_is_read(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "lists.yml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_lists(path)


def test_a_decision_is_the_pair_of_dtype_and_reason_with_the_dtype_of_the_arithmetic_beside_it() -> None:
    decision = Policy.create("O2").decide("softmax", [torch.float16])
    dtype, reason = decision
    assert (dtype, reason) == (decision.dtype, decision.reason)
    assert dtype is torch.float16
    assert decision.compute is torch.float32
    assert repr(decision).endswith("compute=torch.float32)")


@given(level=st.sampled_from(["OD", "O1", "O2"]), half=st.sampled_from([torch.float16, torch.bfloat16]))
def test_in_float32_every_operator_is(level: str, half: torch.dtype) -> None:
    policy = Policy.create(level, half).in_float32()
    for variant in VARIANTS:
        decision = policy.decide(variant, (half, torch.float32))
        assert decision.dtype is decision.compute is torch.float32, variant
