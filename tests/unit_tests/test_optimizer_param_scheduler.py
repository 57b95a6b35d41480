"""Learning rate and weight decay against the formulas, corner values, resume."""

import json
import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.errors import ConfigError
from megatron.core.optimizer_param_scheduler import DECAY_STYLES, WSD_STYLES, OptimizerParamScheduler


def optimizer(**extra):
    groups = [{"wd_mult": 1.0, "lr_mult": 1.0}, {"wd_mult": 0.0, "lr_mult": 1.0}]
    if extra:
        groups.append({"wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": True, **extra})
    return SimpleNamespace(param_groups=groups)


def scheduler(opt=None, **changes):
    arguments = {
        "init_lr": 0.0, "max_lr": 1.0, "min_lr": 0.1, "lr_warmup_steps": 10, "lr_decay_steps": 110, "lr_decay_style": "cosine",
        "start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": 110, "wd_incr_style": "constant",
    }  # fmt: skip
    return OptimizerParamScheduler(opt or optimizer(), **{**arguments, **changes})


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("constant", {10: 1.0, 60: 1.0, 500: 1.0}),
        ("linear", {10: 1.0, 60: 0.55, 110: 0.1, 500: 0.1}),
        ("cosine", {10: 1.0, 35: 0.1 + 0.9 * 0.5 * (math.cos(math.pi / 4) + 1), 60: 0.55, 110: 0.1, 500: 0.1}),
        ("inverse-square-root", {10: 1.0, 40: 0.5, 111: 0.1}),
    ],
)
def test_curve_of_each_style(style, expected):
    for at, lr in {0: 0.0, 5: 0.5, **expected}.items():
        sched = scheduler(lr_decay_style=style)
        sched.step(at)
        assert sched.optimizer.param_groups[0]["lr"] == pytest.approx(lr, abs=1e-15), at


@pytest.mark.parametrize(
    ("style", "half"), [("linear", 0.5), ("cosine", 0.5), ("exponential", 2 * 0.5**0.5 - 1), ("minus_sqrt", 1 - 0.5**0.5)]
)
def test_wsd_is_flat_then_anneals(style, half):
    sched = scheduler(lr_decay_style="WSD", wsd_decay_steps=20, lr_wsd_decay_style=style)
    sched.step(90)
    assert sched.get_lr({}) == 1.0
    sched.step(10)
    assert sched.get_lr({}) == pytest.approx(0.1 + 0.9 * half)
    sched.step(10)
    assert sched.get_lr({}) == pytest.approx(0.1)


def test_groups_take_their_multipliers_and_their_own_learning_rate():
    opt = optimizer(max_lr=0.5, min_lr=0.05)
    scheduler(opt, lr_decay_style="linear").step(60)
    assert [group["lr"] for group in opt.param_groups] == pytest.approx([0.55, 0.55, 0.275])
    assert [group["weight_decay"] for group in opt.param_groups] == [0.1, 0.0, 0.1]


@pytest.mark.parametrize(("style", "middle"), [("linear", 0.3), ("cosine", 0.3)])
def test_weight_decay_goes_from_start_to_end(style, middle):
    sched = scheduler(start_wd=0.1, end_wd=0.5, wd_incr_steps=100, wd_incr_style=style)
    assert sched.get_wd() == pytest.approx(0.1)
    sched.step(50)
    assert sched.get_wd() == pytest.approx(middle)
    sched.step(100)
    assert sched.get_wd() == 0.5


@given(
    style=st.sampled_from(DECAY_STYLES), wsd_style=st.sampled_from(WSD_STYLES), warmup=st.integers(0, 20),
    decay=st.integers(0, 20), wsd=st.integers(1, 30), at=st.integers(0, 60),
)  # fmt: skip
def test_every_legal_setting_stays_within_its_bounds(style, wsd_style, warmup, decay, wsd, at):
    sched = scheduler(
        lr_decay_style=style, lr_warmup_steps=warmup, lr_decay_steps=decay, wsd_decay_steps=wsd, lr_wsd_decay_style=wsd_style
    )
    sched.step(at)
    lr = sched.get_lr({})
    assert 0.0 <= lr <= 1.0
    if style != "constant" and at > max(warmup, decay):
        assert lr == 0.1


def test_resume_continues_the_curve_and_survives_json():
    whole, first = scheduler(), scheduler()
    whole.step(40)
    first.step(30)
    opt = optimizer()
    second = scheduler(opt)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.step(10)
    assert second.num_steps == 40
    assert opt.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]


def test_a_changed_schedule_is_an_error_unless_told_which_one_wins():
    saved = scheduler(optimizer(max_lr=0.5, min_lr=0.0)).state_dict()
    with pytest.raises(ConfigError, match=r"max_lr is 2.0 but the checkpoint has 1.0.*decoupled_max_lr is 0.7"):
        scheduler(optimizer(max_lr=0.7, min_lr=0.0), max_lr=2.0).load_state_dict(saved)
    kept = scheduler(optimizer(max_lr=0.7, min_lr=0.0), max_lr=2.0, override_opt_param_scheduler=True)
    kept.load_state_dict(saved)
    assert kept.max_lr == 2.0
    taken = scheduler(optimizer(max_lr=0.7, min_lr=0.0), max_lr=2.0, use_checkpoint_opt_param_scheduler=True)
    taken.load_state_dict(saved)
    assert (taken.max_lr, taken.optimizer.param_groups[2]["max_lr"]) == (1.0, 0.5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"min_lr": 2.0}, "min_lr=2"),
        ({"init_lr": 2.0}, "lr_warmup_init"),
        ({"lr_decay_style": "step"}, "lr_decay_style"),
        ({"lr_decay_style": "WSD"}, "lr_wsd_decay"),
        ({"start_wd": 0.0}, "constant needs"),
        ({"lr_warmup_steps": -1}, "at least 0"),
    ],
)
def test_contradictions_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        scheduler(**changes)
