import copy
import io

import pytest
import torch
from torch import nn

from mezzo.optim import attach_master, detach_master, master_of, refresh_master

THIRD = 1.0 / 3.0


def half_parameter(dtype: torch.dtype = torch.float16, shape: tuple[int, ...] = (4, 3)) -> nn.Parameter:
    value = torch.full(shape, THIRD)
    param = nn.Parameter(value.to(dtype))
    attach_master(param, value)
    return param


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_master_keeps_the_float32_value_that_the_half_parameter_lost(dtype: torch.dtype) -> None:
    param = half_parameter(dtype)
    master = master_of(param)
    assert master is not None
    assert master.dtype == torch.float32
    assert (master == THIRD).all()
    assert (param.float() != THIRD).all()
    assert master_of(param) is master


def test_master_is_refused_for_a_float32_parameter_and_for_another_shape() -> None:
    with pytest.raises(ValueError, match="float32"):
        attach_master(nn.Parameter(torch.ones(2)), torch.ones(2))
    with pytest.raises(ValueError, match=r"\(3,\).*\(2,\)"):
        attach_master(nn.Parameter(torch.ones(2).half()), torch.ones(3))


def edit_in_place(param: nn.Parameter) -> None:
    with torch.no_grad():
        param.fill_(2.0)


def edit_by_data(param: nn.Parameter) -> None:
    param.data = torch.full_like(param, 2.0)


def edit_by_load(param: nn.Parameter) -> None:
    holder = nn.Module()
    holder.weight = param
    holder.load_state_dict({"weight": torch.full(param.shape, 2.0)})


@pytest.mark.parametrize("edit", [edit_in_place, edit_by_data, edit_by_load])
def test_master_follows_an_edit_of_the_half_parameter(edit) -> None:
    param = half_parameter()
    edit(param)
    assert (master_of(param) == 2.0).all()


def test_data_copy_is_invisible_until_refresh_master_is_called() -> None:
    param = half_parameter()
    param.data.copy_(torch.full((4, 3), 2.0))
    assert (master_of(param) == THIRD).all()
    assert (refresh_master(param) == 2.0).all()
    assert (master_of(param) == 2.0).all()


def test_swapping_other_weights_in_and_back_keeps_the_master() -> None:
    param = half_parameter()
    own = param.data
    param.data = torch.zeros_like(own)
    param.data = own
    assert (master_of(param) == THIRD).all()


def test_detached_and_never_attached_parameters_have_no_master() -> None:
    param = half_parameter()
    detach_master(param)
    detach_master(param)
    assert master_of(param) is None
    assert refresh_master(param) is None


def test_model_float_makes_the_parameter_its_own_master_again() -> None:
    param = half_parameter()
    param.data = param.data.float()
    assert master_of(param) is None


def test_master_has_the_strides_of_a_channels_last_parameter() -> None:
    value = torch.randn(4, 3, 2, 2)
    param = nn.Parameter(value.half().to(memory_format=torch.channels_last))
    master = attach_master(param, value)
    assert master.stride() == param.stride() != value.stride()
    assert torch.equal(master, value)
    edit_in_place(param)
    assert master_of(param).stride() == param.stride()


@pytest.mark.gpu
def test_master_moves_with_the_parameter_to_another_device_without_losing_precision() -> None:
    param = half_parameter()
    param.data = param.data.cuda()
    assert master_of(param).is_cuda
    assert (master_of(param) == THIRD).all()


def test_tied_parameters_share_one_master() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).half()
    model[1].weight = model[0].weight
    attach_master(model[0].weight, torch.ones(3, 3))
    assert master_of(model[1].weight) is master_of(model[0].weight)


def test_master_survives_pickling_and_deepcopy_of_the_parameter() -> None:
    param = half_parameter()
    file = io.BytesIO()
    torch.save(param, file)
    file.seek(0)
    for weights_only in (True, False):
        file.seek(0)
        loaded = torch.load(file, weights_only=weights_only)
        assert (master_of(loaded) == THIRD).all()
    twin = copy.deepcopy(param)
    assert (master_of(twin) == THIRD).all()
    assert master_of(twin) is not master_of(param)
