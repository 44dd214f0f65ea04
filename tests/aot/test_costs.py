# SPDX-License-Identifier: Apache-2.0
"""Protects the reading of compiled programs: parts, kinds, loops, collectives, memory messages.

The oracle is arithmetic done by hand on small HLO texts whose instructions have the form of libtpu
0.0.42 to 0.0.50 (shortened); nothing of the reader is used to make them. Times are exact up to
float rounding, so comparisons allow 1e-9 relative.
"""

import json

import pytest
from atomic_kernels.schedule.chips import CHIPS
from atomic_kernels.schedule.hlo import HloModule

from atomic_lib.aot.costs import ProgramCosts, part_times, ring_bytes
from atomic_lib.aot.kernels import KernelSchedule, distinct_kernels, kernel_key
from atomic_lib.aot.memory import compile_overflow
from atomic_lib.aot.parts import PARTS, part_of

V5E = CHIPS["v5e"]
CLOCK = 1.5e9  # cycles a second, v5e
MEMORY = 0.855 * 819e9  # bytes a second
LINK = 90e9
MIB = 2**20

KERNEL_CONFIGURATION = json.dumps(
    {
        "flag_configs": [],
        "scoped_memory_configs": [{"memory_space": "1", "offset": "0", "size": "104857600"}],
        "custom_call_config": {"body": "QUJD", "needs_layout_passes": True},
    }
)

PROGRAM = f"""HloModule jit_step, is_scheduled=true

%matmul.body (p0: bf16[512,1024], p1: bf16[1024,1024]) -> bf16[512,1024] {{
  %p0 = bf16[512,1024]{{1,0}} parameter(0)
  %p1 = bf16[1024,1024]{{1,0}} parameter(1)
  ROOT %c = bf16[512,1024]{{1,0}} convolution(%p0, %p1), dim_labels=bf_io->bf
}}

%pass.body (p: bf16[512,1024]) -> bf16[512,1024] {{
  %p = bf16[512,1024]{{1,0}} parameter(0)
  ROOT %t = bf16[512,1024]{{1,0}} tanh(%p)
}}

%body (carry: (s32[], bf16[512,1024])) -> (s32[], bf16[512,1024]) {{
  %carry = (s32[], bf16[512,1024]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %x = bf16[512,1024]{{1,0}} get-tuple-element(%carry), index=1
  %fusion.9 = bf16[512,1024]{{1,0}} fusion(%x), kind=kLoop, calls=%pass.body, metadata={{op_name="jit(step)/jvp(loss)/while/body/tanh"}}, backend_config={{"estimated_cycles":"300"}}
  ROOT %r = (s32[], bf16[512,1024]{{1,0}}) tuple(%i, %fusion.9)
}}

%condition (carry: (s32[], bf16[512,1024])) -> pred[] {{
  %carry = (s32[], bf16[512,1024]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %n = s32[] constant(4)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}}

ENTRY %main (x: bf16[512,1024], w: bf16[1024,1024]) -> bf16[512,1024] {{
  %x = bf16[512,1024]{{1,0}} parameter(0)
  %w = bf16[1024,1024]{{1,0}} parameter(1)
  %fusion.1 = bf16[512,1024]{{1,0}} fusion(%x, %w), kind=kOutput, calls=%matmul.body, metadata={{op_name="jit(step)/jvp(block_0)/mixer_0/q/dot_general"}}, backend_config={{"estimated_cycles":"15000"}}
  %gather = (bf16[128,1024]{{1,0}}, bf16[1024,1024]{{1,0}}) all-gather-start(%w), replica_groups={{{{0,1,2,3,4,5,6,7}}}}, dimensions={{0}}
  %my_kernel.2 = bf16[512,1024]{{1,0}} custom-call(%fusion.1, %fusion.1), custom_call_target="tpu_custom_call", operand_layout_constraints={{bf16[512,1024]{{1,0}}, bf16[512,1024]{{1,0}}}}, metadata={{op_name="jit(step)/transpose(jvp(gdn2_kernel))/my_kernel/pallas_call"}}, backend_config={KERNEL_CONFIGURATION}
  %gathered = bf16[1024,1024]{{1,0}} all-gather-done(%gather)
  %fusion.2 = bf16[512,1024]{{1,0}} fusion(%my_kernel.2), kind=kLoop, calls=%pass.body, metadata={{op_name="jit(step)/transpose(jvp(depth_routing))/mul"}}, backend_config={{"estimated_cycles":"9000"}}
  %zero = s32[] constant(0)
  %start = (s32[], bf16[512,1024]{{1,0}}) tuple(%zero, %fusion.2)
  %loop = (s32[], bf16[512,1024]{{1,0}}) while(%start), condition=%condition, body=%body, backend_config={{"known_trip_count":{{"n":"4"}}}}
  %y = bf16[512,1024]{{1,0}} get-tuple-element(%loop), index=1
  %sum = bf16[512,1024]{{1,0}} all-reduce(%y), replica_groups={{{{0,1,2,3,4,5,6,7}}}}, to_apply=%add, metadata={{op_name="jit(step)/psum"}}
  ROOT %out = bf16[512,1024]{{1,0}} copy(%sum), metadata={{op_name="jit(step)/optimizer/copy"}}
}}
"""  # noqa: E501


@pytest.fixture(scope="module")
def module():
    return HloModule(PROGRAM)


def schedules_of(module, kernel_cycles, stall_cycles=0):
    (kernel,) = distinct_kernels([module])
    schedule = KernelSchedule(
        key=kernel.key, name=kernel.name, cycles=kernel_cycles, stall_cycles=stall_cycles,
        hbm_bytes=0, vmem_bytes=None,
    )  # fmt: skip
    return {kernel.key: schedule}


def costs_of(module, **cycles):
    costs = ProgramCosts(module, V5E, schedules_of(module, **cycles)).costs
    return {cost.name: cost for cost in costs}


def test_each_instruction_gets_its_part_and_kind(module):
    costs = costs_of(module, kernel_cycles=60_000)
    found = {name: (cost.part, cost.kind) for name, cost in costs.items()}
    assert found.pop("lt")[0] == "other"  # the loop's own test
    assert found == {
        "fusion.1": ("matrix products", "matrix product"),
        "gather": ("collectives", "collective"),
        "my_kernel.2": ("GDN-2 kernels", "kernel"),
        "fusion.2": ("depth routing", "pass"),
        "fusion.9": ("loss", "pass"),
        "sum": ("collectives", "collective"),
        "out": ("optimiser", "pass"),
    }


def test_estimates_are_cycles_over_the_clock_times_the_trip_count(module):
    costs = costs_of(module, kernel_cycles=60_000)
    assert costs["fusion.1"].seconds == pytest.approx(15_000 / CLOCK, rel=1e-9)
    assert costs["fusion.9"].executions == 4
    assert costs["fusion.9"].seconds == pytest.approx(4 * 300 / CLOCK, rel=1e-9)


def test_a_pass_is_never_slower_at_bandwidth_and_a_matrix_product_stays(module):
    costs = costs_of(module, kernel_cycles=60_000)
    moved = 2 * MIB  # 512 x 1024 bf16 read and written
    assert costs["fusion.2"].seconds_at_bandwidth == pytest.approx(moved / MEMORY, rel=1e-9)
    assert costs["fusion.2"].seconds == pytest.approx(9_000 / CLOCK, rel=1e-9)
    assert costs["fusion.1"].seconds_at_bandwidth == costs["fusion.1"].seconds


@pytest.mark.parametrize(
    ("cycles", "bound"), [(60_000, "schedule"), (10, "bytes")], ids=lambda value: str(value)
)
def test_a_kernel_takes_the_longer_of_its_schedule_and_its_bytes(module, cycles, bound):
    kernel = costs_of(module, kernel_cycles=cycles)["my_kernel.2"]
    # Both operands are one array: read once, written once.
    wanted = {"schedule": cycles / CLOCK, "bytes": 2 * MIB / MEMORY}[bound]
    assert kernel.seconds == pytest.approx(wanted, rel=1e-9)


def test_the_waits_of_a_kernel_are_left_out_at_bandwidth_only(module):
    kernel = costs_of(module, kernel_cycles=60_000, stall_cycles=9_000)["my_kernel.2"]
    assert kernel.seconds == pytest.approx(69_000 / CLOCK, rel=1e-9)
    assert kernel.seconds_at_bandwidth == pytest.approx(60_000 / CLOCK, rel=1e-9)


def test_an_asynchronous_collective_costs_what_the_work_beside_it_does_not_cover(module):
    sent = 7 / 8 * 2 * MIB / LINK  # the gathered 1024 x 1024 bf16 array
    covered = costs_of(module, kernel_cycles=60_000)["gather"]
    exposed = costs_of(module, kernel_cycles=10)["gather"]
    assert covered.seconds == 0.0
    assert exposed.seconds == pytest.approx(sent - 2 * MIB / MEMORY, rel=1e-9)


def test_a_synchronous_all_reduce_sends_twice_its_size_around_the_ring(module):
    reduced = costs_of(module, kernel_cycles=10)["sum"]
    assert reduced.seconds == pytest.approx(2 * 7 / 8 * MIB / LINK, rel=1e-9)


def test_part_times_add_up_to_all_costs(module):
    costs = costs_of(module, kernel_cycles=60_000).values()
    parts = part_times(costs)
    assert [part.part for part in parts] == [p for p in PARTS if p in {c.part for c in costs}]
    total = sum(part.milliseconds for part in parts)
    assert total == pytest.approx(1e3 * sum(cost.seconds for cost in costs), rel=1e-9)
    assert sum(part.instructions for part in parts) == len(costs)


def test_a_loop_of_unknown_length_is_refused_by_name():
    text = PROGRAM.replace('"known_trip_count":{"n":"4"}', "").replace("constant(4)", "negate(%i)")
    module = HloModule(text)
    with pytest.raises(ValueError, match=r"%\S+ runs an unknown number of times"):
        costs_of(module, kernel_cycles=10)


def test_a_kernel_is_known_by_its_code_and_shapes(module):
    (kernel,) = distinct_kernels([module, module])
    assert kernel.name == "my_kernel"
    assert kernel.operands == (("bfloat16", (512, 1024)),) * 2
    assert kernel.results == (("bfloat16", (512, 1024)),)
    assert json.loads(kernel.configuration)["custom_call_config"]["body"] == "QUJD"
    assert kernel.vmem_limit_bytes == 100 * 2**20
    other = HloModule(PROGRAM.replace("QUJD", "QUJE"))
    assert distinct_kernels([other])[0].key != kernel.key
    plain = next(item for item in module.computations["main"] if item.name == "fusion.1")
    assert kernel_key(plain) is None


@pytest.mark.parametrize(
    ("op_name", "is_product", "part"),
    [
        ("jit(step)/transpose(jvp(loss))/dot_general", True, "loss"),
        ("jit(step)/optimizer/newton/dot_general", True, "optimiser"),
        ("jit(step)/jvp(block_3)/ffn/gate/dot_general", True, "matrix products"),
        ("jit(step)/jvp(block_3)/mixer_3/attention_kernel/exp", False, "attention"),
        ("jit(step)/jvp(block_3)/mixer_1_norm/mul", False, "other"),
        ("", False, "other"),
        # The innermost name decides; a name inside another word does not.
        ("jit(step)/loss/depth_routing/mul", False, "depth routing"),
        ("jit(step)/loss_scale/mul", False, "other"),
    ],
)
def test_the_innermost_known_scope_decides_the_part(op_name, is_product, part):
    assert part_of(op_name, is_matrix_product=is_product, is_collective=False) == part


@pytest.mark.parametrize(
    ("opcode", "devices", "factor"),
    [
        ("all-reduce", 8, 1.75),
        ("all-gather", 8, 0.875),
        ("reduce-scatter", 8, 7.0),  # of its result, which is an eighth of what is reduced
        ("all-to-all", 4, 0.75),
        ("collective-permute", 8, 1.0),
    ],
)
def test_ring_bytes_follow_the_ring_algorithm(opcode, devices, factor):
    assert ring_bytes(opcode, 1000, devices) == pytest.approx(1000 * factor)


@pytest.mark.parametrize(
    ("message", "sizes"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (23.30G) exceeds available HBM (15.75G).",
            (23.30, 15.75),
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 18.50G of 15.75G "
            "hbm. Exceeded hbm capacity by 2.75G.",
            (18.50, 15.75),
        ),
        ("INTERNAL: Mosaic failed to compile TPU kernel", None),
    ],
)
def test_the_compilers_memory_message_is_read(message, sizes):
    found = compile_overflow(message)
    if sizes is None:
        assert found is None
    else:
        assert found == pytest.approx([size * 2**30 for size in sizes], abs=1)


CHAINED = """HloModule jit_step, is_scheduled=true

%start.body (p: bf16[128,1024]) -> (bf16[128,1024], bf16[1024,1024], u32[]) {
  %p = bf16[128,1024]{1,0} parameter(0)
  %g.1 = bf16[1024,1024]{1,0} all-gather(%p), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, frontend_attributes={chain_id="4"}
  ROOT %c.1 = (bf16[128,1024]{1,0}, bf16[1024,1024]{1,0}, u32[]) custom-call(%g.1), custom_call_target="AsyncCollectiveStart"
}

%middle.body (p.1: bf16[512,1024], q.1: bf16[1024,1024], s: bf16[128,1024]) -> bf16[512,1024] {
  %p.1 = bf16[512,1024]{1,0} parameter(0)
  %q.1 = bf16[1024,1024]{1,0} parameter(1)
  %s = bf16[128,1024]{1,0} parameter(2)
  %g.2 = bf16[1024,1024]{1,0} all-gather(%s), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, frontend_attributes={chain_id="4"}
  ROOT %d = bf16[512,1024]{1,0} convolution(%p.1, %q.1), dim_labels=bf_io->bf
}

%end.body (s.1: bf16[128,1024]) -> bf16[1024,1024] {
  %s.1 = bf16[128,1024]{1,0} parameter(0)
  %g.3 = bf16[1024,1024]{1,0} all-gather(%s.1), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, frontend_attributes={chain_id="4"}
  ROOT %c.3 = bf16[1024,1024]{1,0} custom-call(%g.3), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (x: bf16[512,1024], w: bf16[1024,1024], v: bf16[128,1024]) -> bf16[1024,1024] {
  %x = bf16[512,1024]{1,0} parameter(0)
  %w = bf16[1024,1024]{1,0} parameter(1)
  %v = bf16[128,1024]{1,0} parameter(2)
  %async-collective-start = (bf16[128,1024]{1,0}, bf16[1024,1024]{1,0}, u32[]) fusion(%v), kind=kCustom, calls=%start.body
  %fusion.1 = bf16[512,1024]{1,0} fusion(%x, %w, %v), kind=kOutput, calls=%middle.body, backend_config={"estimated_cycles":"15000"}
  ROOT %async-collective-done = bf16[1024,1024]{1,0} fusion(%v), kind=kCustom, calls=%end.body
}
"""  # noqa: E501


def test_a_gather_that_runs_during_a_matrix_product_counts_once():
    costs = {cost.name: cost for cost in ProgramCosts(HloModule(CHAINED), V5E, {}).costs}
    assert set(costs) == {"async-collective-start", "fusion.1"}
    assert costs["fusion.1"].kind == "matrix product"
    assert costs["fusion.1"].seconds == pytest.approx(15_000 / CLOCK, rel=1e-9)
    exposed = 7 / 8 * 2 * MIB / LINK - 15_000 / CLOCK
    assert exposed > 0
    assert costs["async-collective-start"].seconds == pytest.approx(exposed, rel=1e-9)
