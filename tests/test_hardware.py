"""Profiles, prices and predictions against hand calculation; profiles from files and machines."""

import doctest
import math
from dataclasses import replace

import models
import pytest
import torch

from tpcompile import hardware as hardware_module
from tpcompile import pipeline
from tpcompile.calibrate import measured_profile
from tpcompile.clone import clone
from tpcompile.cost import CostModel
from tpcompile.errors import HardwareError
from tpcompile.hardware import Hardware, Link, fraction_at
from tpcompile.measure import fit_link
from tpcompile.planning import captured
from tpcompile.predict import Times, predict
from tpcompile.profiles import DEFAULT, PROFILES, default_for, hardware_for
from tpcompile.program import Program
from tpcompile.work import Sides

MIB = 2**20
ROUND = Hardware(
    "round",
    {torch.float32: 1e12, torch.bfloat16: 2e12},
    memory_bandwidth=1e11,
    memory=1e9,
    inside=Link(100e9, 1e-6, 5e-6),
    between=Link(10e9, 3e-6, 7e-6),
    node=8,
    launch=1e-6,
    efficiency=((16, 0.25), (256, 0.75)),
)
"""Numbers that are easy to multiply."""


def test_ring_volumes():
    """A rank of an all-reduce sends 2 b s h (t-1)/t; the other collectives half of it or less."""
    cost, nbytes = CostModel(4, ROUND), 64 * MIB
    part = nbytes * 3 / 4 / 100e9
    assert cost.collective("all_reduce", nbytes) == pytest.approx(5e-6 + 6e-6 + 2 * part)
    for kind in ("all_gather", "reduce_scatter"):
        assert cost.collective(kind, nbytes) == pytest.approx(5e-6 + 3e-6 + part)
    assert cost.collective("all_to_all", nbytes) == pytest.approx(5e-6 + 3e-6 + part / 4)
    assert CostModel(1, ROUND).collective("all_reduce", nbytes) == 0


def test_node_boundary():
    """Beyond a node a ring has one network link for each member inside, and dearer hops."""
    assert not ROUND.crosses(8)
    assert ROUND.crosses(16)
    assert ROUND.bandwidth(8) == 100e9
    assert ROUND.bandwidth(16) == 8 * 10e9
    assert ROUND.latency(16) == pytest.approx(7e-6 + 14 * 1e-6 + 1 * 3e-6)
    # Replicas of TP 8 are 8 apart: each is alone in its node.
    assert ROUND.bandwidth(4, stride=8) == 10e9
    assert ROUND.latency(4, rounds=2, stride=8) == pytest.approx(7e-6 + 2 * 3 * 3e-6)
    assert not replace(ROUND, between=None).crosses(64)


def test_network_is_no_faster_than_the_node():
    """Eight fast network links do not beat the links inside the node."""
    fast = replace(ROUND, between=Link(50e9, 3e-6))
    assert fast.bandwidth(16) == ROUND.inside.bandwidth


def test_efficiency_curve():
    """Linear in the logarithm between points, flat above, falling to nothing below."""
    assert ROUND.matmul_rate(torch.float32, 64) == pytest.approx(0.5e12)
    assert ROUND.matmul_rate(torch.bfloat16) == pytest.approx(1.5e12)
    assert fraction_at(ROUND.efficiency, 8) == pytest.approx(0.125)
    assert ROUND.matmul_rate(torch.complex64, 256) == pytest.approx(0.75e12)
    assert doctest.testmod(hardware_module).failed == 0


def test_op_seconds():
    """The launch, and the slower of arithmetic and memory; three times that where trained."""
    cost = CostModel(1, ROUND)
    assert cost.compute(3e9, 1e6, torch.float32, False, 256) == pytest.approx(1e-6 + 4e-3)
    assert cost.compute(1e3, 1e9, torch.float32, True) == pytest.approx(3 * (1e-6 + 1e-2))


@pytest.mark.parametrize(
    ("marks", "sides"),
    [
        ((True, True, False), (8, 16, 8)),
        ((True, False, True), (2, 16, 32)),
        ((False, True, True), (8, 4, 32)),
        ((True, True, True), (8, 16, 32)),
    ],
)
def test_split_matmul(marks: tuple[bool, bool, bool], sides: tuple[int, int, int]):
    """Which side shrinks follows from which tensors have the dim; a batch dim shrinks none."""
    assert Sides(8, 16, 32).split(0.25, *marks) == Sides(*sides)


def _mlp(width: int = 256, ffn: int = 1024, tokens: int = 512) -> Program:
    with torch.device("meta"):
        model = models.MLP(width, ffn)
    x = torch.empty(tokens, width, device="meta", requires_grad=True)
    return captured(model, (x,), {})


def _times(program: Program, size: int, hardware: Hardware) -> Times:
    copy = clone(program)
    copy.extra["stages"] = []
    return predict(pipeline.plan(copy, size, hardware=hardware))


def test_predicted_times():
    """An MLP on 4 ranks: a quarter of the matmuls, and what Megatron's two all-reduces send."""
    machine = replace(ROUND, launch=0.0, memory_bandwidth=1e18, efficiency=((1, 1.0),))
    program = _mlp()
    flops = 2 * 2 * 512 * 256 * 1024 * 3
    assert _times(program, 1, machine).compute == pytest.approx(flops / 1e12, rel=1e-4)
    times = _times(program, 4, machine)
    assert times.compute == pytest.approx(flops / 4 / 1e12, rel=1e-4)
    reduced = CostModel(4, machine).collective("all_reduce", 512 * 256 * 4)
    assert times.communication == pytest.approx(2 * reduced, rel=1e-4)
    assert times.by_kind == pytest.approx({"all_reduce": 2 * reduced}, rel=1e-4)


def test_more_ranks_compute_less_and_send_more():
    """Monotone in the degree, on every profile."""
    program = _mlp(1024, 4096, 4096)
    for machine in PROFILES.values():
        times = [_times(program, size, machine) for size in (1, 2, 4, 8, 16)]
        compute = [t.compute for t in times]
        assert compute == sorted(compute, reverse=True), machine.name
        traffic = [t.communication for t in times]
        assert traffic == sorted(traffic), machine.name
        assert traffic[0] == 0 < traffic[1]


def test_profiles_are_ordered():
    """Newer chips are not slower, NVLink beats PCIe, and each can be saved."""
    a100, h100, h200, b200 = (PROFILES[f"{c}-nvlink"] for c in ("a100", "h100", "h200", "b200"))
    rates = [p.matmul_rate(torch.bfloat16) for p in (a100, h100, h200, b200)]
    assert rates == sorted(rates)
    memories = [p.memory for p in (a100, h100, h200, b200)]
    assert memories == sorted(memories)
    for chip in ("a100", "h100"):
        assert PROFILES[f"{chip}-pcie"].bandwidth(8) < PROFILES[f"{chip}-nvlink"].bandwidth(8)
    assert default_for("cpu") is DEFAULT is PROFILES["h100-nvlink"]


@pytest.mark.parametrize(
    ("device", "profile"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-nvlink"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA H200", "h200-nvlink"),
        ("NVIDIA GeForce RTX 4090", "h100-nvlink"),
    ],
)
def test_default_by_device_name(monkeypatch: pytest.MonkeyPatch, device: str, profile: str):
    """A CUDA mesh is priced as its GPUs where they are known."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device)
    assert default_for("cuda").name == profile


def test_profile_from_file(tmp_path):
    """`save` and `hardware=path` are a round trip, and TOML is read too."""
    ROUND.save(tmp_path / "mine.json")
    assert hardware_for(tmp_path / "mine.json") == ROUND
    assert hardware_for(str(tmp_path / "mine.json")).flops == ROUND.flops
    (tmp_path / "mine.toml").write_text(
        'name = "lab"\nmemory_bandwidth = 1e12\nmemory = 24e9\nnode = 2\n'
        "[flops]\nfloat32 = 1e13\n[inside]\nbandwidth = 25e9\nlatency = 2e-6\n"
    )
    lab = hardware_for(tmp_path / "mine.toml")
    assert (lab.name, lab.node, lab.between, lab.inside.bandwidth) == ("lab", 2, None, 25e9)


def test_unknown_profile():
    """The error lists the names there are."""
    with pytest.raises(HardwareError) as error:
        hardware_for("h100")
    assert str(error.value) == (
        "hardware='h100'\n"
        "  no file has that name, and the profiles are a100-nvlink, h100-nvlink, h200-nvlink, "
        "b200-nvlink, a100-pcie, h100-pcie, cpu-gloo\n"
        "  fix: use one of those, a Hardware, or a file that tpcompile.calibrate(path=...) wrote"
    )


@pytest.mark.parametrize("text", ["{", "[]", '{"name": "x"}', '{"flops": {"bfloat16": 1}}'])
def test_bad_profile_file(tmp_path, text: str):
    """A file that does not describe a machine is an error that names the file."""
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(HardwareError, match=r"bad\.json") as error:
        hardware_for(tmp_path / "bad.json")
    assert "does not describe a machine" in str(error.value)


def test_fitted_link_is_the_one_that_made_the_samples():
    """Least squares recover startup, hop and bandwidth, also where one of them is nothing."""
    for link in (ROUND.inside, Link(2e9, 0.0, 3e-5), Link(2e9, 4e-6, 0.0)):
        machine = replace(ROUND, inside=link, between=None)
        samples = [
            (kind, size, nbytes, CostModel(size, machine).collective(kind, nbytes))
            for size in (2, 4)
            for kind in ("all_reduce", "all_gather", "reduce_scatter")
            for nbytes in (4096, MIB, 64 * MIB)
        ]
        found = fit_link(samples)
        assert found.bandwidth == pytest.approx(link.bandwidth, rel=1e-6)
        assert found.latency == pytest.approx(link.latency, abs=1e-10)
        assert found.startup == pytest.approx(link.startup, abs=1e-10)


def profile_here() -> Hardware:
    """What calibration of a rank's process group says."""
    return measured_profile("here")


def test_calibrated_group(ranks):
    """All ranks get one profile, with rates that a machine can have."""
    first, second = ranks(profile_here, 2)
    assert first == second
    assert first.flops == second.flops
    assert (first.name, first.node, first.between) == ("here", 2, None)
    assert 1e8 < first.matmul_rate(torch.float32) < 1e14
    assert 1e7 < first.memory_bandwidth < 1e13
    assert 1e6 < first.inside.bandwidth < 1e12
    assert 0 < first.launch < 1e-2
    assert all(math.isfinite(share) and 0 < share <= 1 for _, share in first.efficiency)
