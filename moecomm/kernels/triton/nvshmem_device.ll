; Device functions of NVSHMEM as Triton can call them: integers in, an integer out, all threads of a block together.
;
; Triton lets every thread of a block call a function. What NVSHMEM does for a whole block it is handed as it is; what it
; does for one thread (a signal, a fence, a quiet) the first thread calls alone, or a counter would be added to once per
; thread. This is text, so that each version of LLVM reads it; the bodies come from NVSHMEM's own bitcode.
; Nothing is inlined into kernels, whose PTX therefore shows what they call and in which order (ptx_rules.py).

declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
declare void @nvshmemx_putmem_nbi_block(ptr, ptr, i64, i32) convergent
declare void @nvshmemx_putmem_signal_nbi_block(ptr, ptr, i64, ptr, i64, i32, i32) convergent
declare void @nvshmemx_signal_op(ptr, i64, i32, i32) convergent
declare void @nvshmem_fence() convergent
declare void @nvshmem_quiet() convergent
declare i32 @nvshmem_uint64_test(ptr, i32, i64) convergent

define i32 @moecomm_nvshmem_put(i64 %target, i64 %source, i64 %nbytes, i32 %pe) convergent noinline {
  %there = inttoptr i64 %target to ptr
  %here = inttoptr i64 %source to ptr
  call void @nvshmemx_putmem_nbi_block(ptr %there, ptr %here, i64 %nbytes, i32 %pe)
  ret i32 0
}

; 10 is NVSHMEM_SIGNAL_ADD.
define i32 @moecomm_nvshmem_put_signal(i64 %target, i64 %source, i64 %nbytes, i64 %counter, i64 %n, i32 %pe) convergent noinline {
  %there = inttoptr i64 %target to ptr
  %here = inttoptr i64 %source to ptr
  %signal = inttoptr i64 %counter to ptr
  call void @nvshmemx_putmem_signal_nbi_block(ptr %there, ptr %here, i64 %nbytes, ptr %signal, i64 %n, i32 10, i32 %pe)
  ret i32 0
}

define i32 @moecomm_nvshmem_signal(i64 %counter, i64 %n, i32 %pe) convergent noinline {
  %thread = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %is_first = icmp eq i32 %thread, 0
  br i1 %is_first, label %first, label %all
first:
  %signal = inttoptr i64 %counter to ptr
  call void @nvshmemx_signal_op(ptr %signal, i64 %n, i32 10, i32 %pe)
  br label %all
all:
  ret i32 0
}

define i32 @moecomm_nvshmem_fence() convergent noinline {
  %thread = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %is_first = icmp eq i32 %thread, 0
  br i1 %is_first, label %first, label %all
first:
  call void @nvshmem_fence()
  br label %all
all:
  ret i32 0
}

define i32 @moecomm_nvshmem_quiet() convergent noinline {
  %thread = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %is_first = icmp eq i32 %thread, 0
  br i1 %is_first, label %first, label %all
first:
  call void @nvshmem_quiet()
  br label %all
all:
  ret i32 0
}

; 5 is NVSHMEM_CMP_GE: every counter is at least 0. A test that succeeds makes what has arrived visible.
define i32 @moecomm_nvshmem_refresh(i64 %counter) convergent noinline {
  %thread = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %is_first = icmp eq i32 %thread, 0
  br i1 %is_first, label %first, label %all
first:
  %signal = inttoptr i64 %counter to ptr
  %reached = call i32 @nvshmem_uint64_test(ptr %signal, i32 5, i64 0)
  br label %all
all:
  ret i32 0
}
