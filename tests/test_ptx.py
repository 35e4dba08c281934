"""The rules on the PTX of kernels, on small texts that keep or break each of them."""

import pytest

from moecomm.kernels.triton.ptx import access_widths, memory_order, parse
from moecomm.kernels.triton.ptx_rules import acquire_faults, release_faults, spill_faults, width_faults


def kernel(body, name="k", threads=128):
    return f"""
//
// Generated
//
.version 8.7
.target sm_90a
.address_size 64

.extern .shared .align 16 .b8 global_smem[];
.visible .entry {name}(
	.param .u64 .ptr .global .align 1 {name}_param_0,
	.param .u32 {name}_param_1
)
.reqntid {threads}
{{
	.reg .pred 	%p<2>;
	.loc	1 6 0                           // kernel.py:6:0
$L__func_begin0:
	ld.param.b64 	%rd1, [{name}_param_0];
	{body}
	ret;
$L__func_end0:
}}
	.file	1 "/kernel.py"
	.section	.debug_abbrev
	{{
.b8 1                                   // Abbreviation Code
	}}
"""


STORE = "@%p1 st.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };"
LOAD = "ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];"
BARRIER = "bar.sync 0;"
RELEASE = "@%p1 atom.global.sys.release.add.u64 %rd2, [ %rd3 + 0 ], 1;"
ACQUIRE = "@%p1 ld.global.sys.acquire.b64 %rd4, [ %rd5 + 0 ];"
BULK = "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], 1024; cp.async.bulk.commit_group;"
BULK_DONE = "cp.async.bulk.wait_group 0;"
POLL = f"""$L__BB0_1:
    {ACQUIRE}
    @%p1 st.shared.b64 [ %r3 + 0 ], %rd4;
    bar.sync 0;
    ld.shared.b64 %rd6, [global_smem];
    bar.sync 0;
    setp.lt.s64 %p2, %rd6, %rd7;
    @%p2 bra $L__BB0_1;
"""


def test_a_text_is_read():
    text = kernel(
        f"{LOAD}{{ .reg .pred p; setp.eq.u32 p, %r1, 0;\n\t.loc 1 7 0\n @p {STORE[5:]} }} $L__BB0_1: {BARRIER}"
    )
    (function,) = parse(text + kernel("", "second").split(".file")[0].partition("global_smem[];")[2])[:1]
    assert (function.name, function.num_threads) == ("k", 128)
    names = [".".join((one.opcode, *one.qualifiers)) for one in function.body]
    assert names == ["ld.param.b64", "ld.global.v4.b32", "setp.eq.u32", "st.global.v4.b32", "bar.sync", "ret"]
    assert [one.predicate for one in function.body] == [None, None, None, "p", None, None]
    assert function.labels == {"$L__func_begin0": 0, "$L__BB0_1": 4, "$L__func_end0": 6}
    store = function.body[3]
    assert text.splitlines()[store.line - 1].strip().startswith("@p st.global.v4.b32")


def test_several_functions_are_told_apart():
    declared = ".extern .func (.param .b32 r) vprintf\n(\n\t.param .b64 a\n)\n;\n"
    called = f".func (.param .b32 r) helper(.param .b64 a)\n{{\n\t{STORE}\n\tret;\n}}\n"
    functions = parse(declared + called + kernel(LOAD, "second", "8, 4, 2"))
    assert [(one.name, one.num_threads, len(one.body)) for one in functions] == [("helper", None, 2), ("second", 64, 3)]


@pytest.mark.parametrize(
    ("instruction", "loads", "stores"),
    [
        (LOAD, {16: 1}, {}),
        (STORE, {}, {16: 1}),
        ("ld.global.L1::evict_first.L2::cache_hint.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 ], %rd2;", {16: 1}, {}),
        ("ld.global.nc.v2.f64 {%fd1, %fd2}, [%rd1];", {16: 1}, {}),
        ("ld.global.v8.b32 { %r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8 }, [ %rd1 ];", {32: 1}, {}),
        ("ld.global.b128 %rq1, [%rd1];", {16: 1}, {}),
        ("ld.u8 %rs1, [%rd1];", {1: 1}, {}),
        ("st.v2.b16 [%rd1], {%rs1, %rs2};", {}, {4: 1}),
        ("st.volatile.global.b64 [%rd1], %rd2;", {}, {8: 1}),
        ("cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;", {16: 1}, {}),
        ("cp.async.ca.shared.global [%r1], [%rd1], 8;", {8: 1}, {}),
        ("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 1024, [%r2];", {0: 1}, {}),
        ("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r1, %r2}], [%r3];", {}, {0: 1}),
        ("cp.async.commit_group;", {}, {}),
        ("ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r5];", {}, {}),
        ("ld.global.sys.acquire.b64 %rd1, [%rd2];", {}, {}),
        ("red.global.add.f32 [%rd1], %f1;", {}, {}),
    ],
)
def test_widths_of_accesses(instruction, loads, stores):
    found = access_widths(parse(kernel(instruction))[0])
    assert tuple(dict(one) for one in found) == (loads, stores)


def test_instructions_that_order_memory_are_counted():
    body = f"{RELEASE} {ACQUIRE} {BARRIER} {BARRIER} fence.acq_rel.sys; fence.proxy.async.shared::cta; membar.gl;"
    body += f"red.global.add.f32 [%rd1], %f1; {BULK_DONE} barrier.sync.aligned 1; mbarrier.inval.shared.b64 [%r1];"
    assert dict(memory_order(parse(kernel(body))[0])) == {
        "atom.release.sys.add": 1,
        "ld.acquire.sys": 1,
        "bar.sync": 2,
        "barrier.sync": 1,
        "fence.acq_rel.sys": 1,
        "fence.proxy.async.shared::cta": 1,
        "membar.gl": 1,
        "red.relaxed.gpu.add": 1,
        "cp.async.bulk.wait_group": 1,
    }


RELEASED = {
    "barrier between": f"{STORE} {BARRIER} {RELEASE}",
    "red barrier between": f"{STORE} barrier.red.popc.aligned.u32 %r1, 0, %p1; {RELEASE}",
    "barrier of exactly the block": f"{STORE} bar.sync 0, 128; {RELEASE}",
    "nothing stored": RELEASE,
    "stored later": f"{RELEASE} {STORE}",
    "shared memory only": f"st.shared.b32 [%r1], %r2; {RELEASE}",
    "two signals": f"{STORE} {BARRIER} {RELEASE} {RELEASE}",
    "within the block": f"{STORE} {RELEASE.replace('.sys', '.cta')}",
    "barrier on both ways": f"@%p2 bra $A; {STORE} {BARRIER} bra.uni $B; $A: {BARRIER} $B: {RELEASE}",
    "loop with its barrier": f"$A: {STORE} {BARRIER} {RELEASE} @%p2 bra $A;",
    "bulk copy waited for": f"{BULK} {BULK_DONE} {BARRIER} {RELEASE}",
    "way that returns": f"@%p2 bra $A; {STORE} ret; $A: {RELEASE}",
}
TOO_EARLY = {
    "no barrier": f"{STORE} {RELEASE}",
    "store behind the barrier": f"{BARRIER} {STORE} {RELEASE}",
    "generic address": f"st.b32 [%rd1], %r1; {RELEASE}",
    "relaxed atomic": f"red.global.add.u64 [%rd1], 1; {RELEASE}",
    "vector of barriers is no barrier": f"{STORE} bar.sync 1, 64; {RELEASE}",
    "barrier of one warp": f"{STORE} bar.warp.sync -1; {RELEASE}",
    "arrival without waiting": f"{STORE} bar.arrive 0, 128; {RELEASE}",
    "barrier under a condition": f"{STORE} @%p1 bar.sync 0; {RELEASE}",
    "barrier on one way only": f"{STORE} @%p2 bra $A; {BARRIER} $A: {RELEASE}",
    "store on one way only": f"{BARRIER} @%p2 bra $A; {STORE} $A: {RELEASE}",
    "around a loop": f"$A: {RELEASE} {STORE} @%p2 bra $A;",
    "release store": f"{STORE} st.release.gpu.global.b32 [%rd2], 1;",
    "reduction": f"{STORE} red.release.sys.global.add.u64 [%rd2], 1;",
    "acquire and release": f"{STORE} atom.acq_rel.gpu.global.exch.b64 %rd2, [%rd3], 1; {BARRIER}",
    "fence and relaxed store": f"{STORE} fence.acq_rel.sys; st.relaxed.sys.global.b32 [%rd2], 1;",
    "old fence": f"{STORE} membar.sys; st.volatile.global.b32 [%rd2], 1;",
    "bulk copy not waited for": f"{BULK} {BARRIER} {RELEASE}",
    "bulk copy only read": f"{BULK} cp.async.bulk.wait_group.read 0; {BARRIER} {RELEASE}",
    "some bulk copies waited for": f"{BULK} {BULK} cp.async.bulk.wait_group 1; {BARRIER} {RELEASE}",
    "bulk copy waited for behind the barrier": f"{BULK} {BARRIER} {BULK_DONE} {RELEASE}",
    "table of jumps": f"ts: .branchtargets $A, $B; {STORE} brx.idx %r1, ts; $B: {BARRIER} $A: {RELEASE}",
    "something called": f"call.uni store_somewhere, (param0); {BARRIER} {RELEASE}",
}


@pytest.mark.parametrize("body", RELEASED.values(), ids=RELEASED)
def test_release_behind_a_barrier_passes(body):
    assert release_faults(kernel(body)) == []


def test_a_block_of_one_warp_needs_no_more_than_its_barrier():
    text = kernel(f"{STORE} bar.warp.sync -1; {RELEASE}", threads=32)
    assert release_faults(text) == []


@pytest.mark.parametrize("body", TOO_EARLY.values(), ids=TOO_EARLY)
def test_release_before_all_stores_are_done_is_caught(body):
    (fault,) = release_faults(kernel(body))
    assert fault.startswith("k: ")
    assert "line " in fault


ACQUIRED = {
    "poll, then load": POLL + LOAD,
    "report of the poller": f"{ACQUIRE} @%p1 st.global.b32 [%rd8], %r1;",
    "polls again": f"$A: {ACQUIRE} @%p2 bra $A; {BARRIER} {LOAD}",
    "loaded before": f"{LOAD} {ACQUIRE}",
    "shared memory only": f"{ACQUIRE} ld.shared.b32 %r1, [%r2];",
    "within the block": f"{ACQUIRE.replace('.sys', '.cta')} {LOAD}",
}
UNGUARDED = {
    "no barrier": ACQUIRE + LOAD,
    "generic address": f"{ACQUIRE} ld.b32 %r1, [%rd1];",
    "rows stored where a peer has read": ACQUIRE + STORE,
    "bulk copy": f"{ACQUIRE} {BULK}",
    "asynchronous load": f"{ACQUIRE} cp.async.cg.shared.global [%r1], [%rd1], 16;",
    "atomic that acquires": f"atom.acquire.sys.global.cas.b64 %rd2, [%rd3], 1, 1; {LOAD}",
    "fence": f"ld.relaxed.sys.global.b64 %rd2, [%rd3]; fence.acq_rel.sys; {LOAD}",
    "barrier before the last look": f"{BARRIER} {ACQUIRE} {LOAD}",
    "barrier on one way only": f"{ACQUIRE} @%p2 bra $A; {BARRIER} $A: {LOAD}",
    "around a loop": f"$A: {LOAD} {ACQUIRE} @%p2 bra $A;",
    "read-only path": f"{POLL} ld.global.nc.v4.b32 {{%r1, %r2, %r3, %r4}}, [%rd1];",
}


@pytest.mark.parametrize("body", ACQUIRED.values(), ids=ACQUIRED)
def test_acquire_before_a_barrier_passes(body):
    assert acquire_faults(kernel(body)) == []


@pytest.mark.parametrize("body", UNGUARDED.values(), ids=UNGUARDED)
def test_access_that_may_overtake_an_acquire_is_caught(body):
    (fault,) = acquire_faults(kernel(body))
    assert fault.startswith("k: ")


@pytest.mark.parametrize(
    ("body", "faults"),
    [
        (f"ld.global.b64 %rd2, [%rd1]; ld.global.b32 %r9, [%rd1]; {LOAD} {STORE}", 0),
        (f"{BULK.replace('global.shared::cta', 'shared::cta.global')} {BULK}", 0),
        (f"{LOAD} ld.global.v2.b32 {{%r1, %r2}}, [%rd1]; {STORE}", 1),
        (f"{LOAD} {STORE} st.global.b16 [%rd1], %rs1;", 1),
        (f"{LOAD} st.global.b32 [%rd1], %r1;", 1),
        (f"ld.global.b64 %rd2, [%rd1]; {STORE}", 1),
        (f"cp.async.ca.shared.global [%r1], [%rd1], 8; {LOAD} {STORE}", 1),
        ("", 2),
    ],
)
def test_narrow_rows_are_caught(body, faults):
    assert len(width_faults(kernel(body))) == faults


def test_spills_are_caught():
    said = "ptxas info : Used 255 registers\n    16 bytes stack frame, {} bytes spill stores, {} bytes spill loads\n"
    assert spill_faults(said.format(0, 0)) == []
    assert spill_faults(said.format(8, 0) + said.format(0, 0)) == ["8 bytes spill stores, 0 bytes spill loads"]
    assert spill_faults(said.format(0, 4)) == ["0 bytes spill stores, 4 bytes spill loads"]
    with pytest.raises(ValueError, match="no line on spills"):
        spill_faults("ptxas info : 0 bytes gmem")


def test_a_library_behind_a_kernel_is_not_looked_at_if_the_kernel_is_named():
    early, unguarded = f"{STORE} {RELEASE}", ACQUIRE + LOAD
    for faults, body, sound in (
        (release_faults, early, f"{STORE} {BARRIER} {RELEASE}"),
        (acquire_faults, unguarded, POLL),
    ):
        text = kernel(sound).partition("\t.section")[0] + kernel(body, name="of_a_library")
        assert len(faults(text)) == 1
        assert faults(text, "k") == []
        assert len(faults(text, "of_a_library")) == 1
    said = (
        "ptxas info : Function properties for {}\n    8 bytes stack frame, {} bytes spill stores, 0 bytes spill loads\n"
    )
    said = said.format("of_a_library", 8) + said.format("k", 0)
    assert len(spill_faults(said)) == 1
    assert spill_faults(said, "k") == []
    with pytest.raises(ValueError, match="no line on spills"):
        spill_faults(said, "another")


def test_what_a_kernel_calls_of_a_network_is_no_fault_of_its_signals():
    put = "call.uni (retval0), moecomm_nvshmem_put, (param0);"
    assert release_faults(kernel(f"{STORE} {BARRIER} {put} {BARRIER} {RELEASE}")) == []
    assert acquire_faults(kernel(f"{POLL} {put}")) == []
