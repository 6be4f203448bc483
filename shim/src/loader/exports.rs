//! Every symbol of the driver, exported: a jump through the symbol's slot.
//!
//! A jump leaves registers and stack as the caller made them, so one form serves every signature. A slot starts
//! at a stub that asks [`mode::resolve`] where this one call goes; `cuInit` then writes the final target
//! ([`install`]). Slots are written atomically and always point at a function that can take the call.

use std::arch::naked_asm;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::loader::gate::{self, BEHIND, GATE, SUBMISSIONS};
use crate::loader::symbols::{COUNT, Target};
use crate::{direct, mode};

/// The exported function of a symbol, which the program calls and `cuGetProcAddress` returns.
pub fn exported(index: usize) -> Target {
    EXPORTED[index]
}

/// The function that answers `CUDA_ERROR_NOT_SUPPORTED` for a symbol and logs its name once.
pub fn absent(index: usize) -> Target {
    ABSENT[index]
}

/// Makes calls of the symbol go to `target` from now on.
pub fn install(index: usize, target: Target) {
    // The jump's load is an acquire on this processor: whatever was written before is seen behind it.
    SLOTS[index].store(target.address().cast_mut(), Ordering::Release);
}

/// Makes calls of the symbol go through its gate to `target` from now on.
pub fn install_gated(index: usize, target: Target) {
    gate::put_behind(index, target);
    install(index, GATES[index]);
}

macro_rules! entry_points {
    ($($index:literal $symbol:ident)*) => {
        static SLOTS: [AtomicPtr<()>; COUNT] = [$(AtomicPtr::new(lazy::$symbol as *mut ())),*];
        static EXPORTED: [Target; COUNT] = [$(Target::new(export::$symbol as *const ())),*];
        static ABSENT: [Target; COUNT] = [$(Target::new(absent::$symbol as *const ())),*];

        /// The exported symbols.
        #[allow(non_snake_case)]
        mod export {
            use super::*;
            $(
                #[unsafe(naked)]
                #[cfg_attr(not(test), unsafe(no_mangle))]
                pub unsafe extern "C" fn $symbol() {
                    naked_asm!("jmp qword ptr [rip + {slots} + 8 * {index}]", slots = sym SLOTS, index = const $index)
                }
            )*
        }

        /// Targets of the slots before `cuInit` has decided.
        #[allow(non_snake_case)]
        mod lazy {
            use super::*;
            $(
                #[unsafe(naked)]
                pub unsafe extern "C" fn $symbol() {
                    naked_asm!("push {index}", "jmp {forward}", index = const $index, forward = sym super::forward)
                }
            )*
        }

        /// Targets of the slots of entry points that submit work, in direct mode.
        #[allow(non_snake_case)]
        mod gated {
            use super::*;
            $(
                #[unsafe(naked)]
                pub unsafe extern "C" fn $symbol() {
                    naked_asm!(
                        "cmp dword ptr [rip + {gate}], 0",
                        "je 2f",
                        "inc dword ptr [rip + {submissions}]",
                        "jmp qword ptr [rip + {behind} + 8 * {index}]",
                        "2:",
                        "push {index}",
                        "jmp {wait}",
                        gate = sym GATE,
                        submissions = sym SUBMISSIONS,
                        behind = sym BEHIND,
                        index = const $index,
                        wait = sym super::wait,
                    )
                }
            )*
        }

        static GATES: [Target; COUNT] = [$(Target::new(gated::$symbol as *const ())),*];

        /// Targets of the slots of entry points that proxy mode does not serve.
        #[allow(non_snake_case)]
        mod absent {
            $(
                #[unsafe(naked)]
                pub unsafe extern "C" fn $symbol() {
                    super::naked_asm!("mov edi, {index}", "jmp {absent}", index = const $index, absent = sym crate::mode::absent)
                }
            )*
        }
    };
}

include!(concat!(env!("OUT_DIR"), "/entry_points.rs"));

/// A function that is entered with a symbol's index on top of the stack, above the caller's return address. It calls
/// `resolve` for the target and jumps there with every argument register as it was.
macro_rules! resolve_and_jump {
    ($(#[$doc:meta])* $name:ident, $resolve:path) => {
        $(#[$doc])*
        #[unsafe(naked)]
        unsafe extern "C" fn $name() {
    // The caller left rsp at 16n + 8, the index took 8, seven registers 56, the vector registers and the padding
    // 136: 16-byte aligned at the call. rax carries the number of vector registers of a variadic call.
    naked_asm!(
        "push rax",
        "push rdi",
        "push rsi",
        "push rdx",
        "push rcx",
        "push r8",
        "push r9",
        "sub rsp, 136",
        "movups [rsp], xmm0",
        "movups [rsp + 16], xmm1",
        "movups [rsp + 32], xmm2",
        "movups [rsp + 48], xmm3",
        "movups [rsp + 64], xmm4",
        "movups [rsp + 80], xmm5",
        "movups [rsp + 96], xmm6",
        "movups [rsp + 112], xmm7",
        "mov rdi, [rsp + 192]",
        "call {resolve}",
        "mov r11, rax",
        "movups xmm0, [rsp]",
        "movups xmm1, [rsp + 16]",
        "movups xmm2, [rsp + 32]",
        "movups xmm3, [rsp + 48]",
        "movups xmm4, [rsp + 64]",
        "movups xmm5, [rsp + 80]",
        "movups xmm6, [rsp + 96]",
        "movups xmm7, [rsp + 112]",
        "add rsp, 136",
        "pop r9",
        "pop r8",
        "pop rcx",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "pop rax",
        "add rsp, 8",
        "jmp r11",
        resolve = sym $resolve,
    )
        }
    };
}

resolve_and_jump!(
    /// The way of a call whose slot has not been written.
    forward,
    mode::resolve
);
resolve_and_jump!(
    /// The way of a call whose gate is closed.
    wait,
    direct::pass
);
