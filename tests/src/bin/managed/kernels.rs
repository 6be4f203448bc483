//! The kernels, and their launches. All have the same parameters.

use super::{Outcome, must, nothing};
use mpsshim_api::cuda::*;
use std::ffi::{CString, c_void};

/// Thread %r4 of %r5; `to` in %rd1, `from` in %rd2, `value` in %r6.
fn kernel(name: &str, body: &str) -> String {
    format!(
        "
.visible .entry {name}(.param .u64 to, .param .u64 from, .param .u32 count, .param .u32 value, .param .u32 step,
    .param .u32 width)
{{
    .reg .pred %p<3>;
    .reg .b32 %r<16>;
    .reg .b64 %rd<12>;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.s32 %r4, %r1, %r2, %r3;
    ld.param.u32 %r5, [count];
    setp.ge.u32 %p1, %r4, %r5;
    @%p1 bra done;
    ld.param.u64 %rd1, [to];
    ld.param.u64 %rd2, [from];
    ld.param.u32 %r6, [value];
{body}
done:
    ret;
}}
"
    )
}

/// Kernels that add to, copy and fill elements of a type.
fn of_elements(name: &str, ty: &str, bytes: u32) -> String {
    let at = format!(
        "    cvta.to.global.u64 %rd1, %rd1;
    cvta.to.global.u64 %rd2, %rd2;
    mul.wide.u32 %rd3, %r4, {bytes};
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
"
    );
    [
        kernel(
            &format!("add_{name}"),
            &format!(
                "{at}    ld.global.{ty} %r7, [%rd4];
    add.s32 %r8, %r7, %r6;
    st.global.{ty} [%rd4], %r8;"
            ),
        ),
        kernel(
            &format!("copy_{name}"),
            &format!(
                "{at}    ld.global.{ty} %r7, [%rd5];
    st.global.{ty} [%rd4], %r7;"
            ),
        ),
        kernel(
            &format!("fill_{name}"),
            &format!("{at}    st.global.{ty} [%rd4], %r6;"),
        ),
    ]
    .concat()
}

/// Adds to the first `width` bytes of each `step` bytes.
const STRIDE: &str = "    ld.param.u32 %r9, [step];
    ld.param.u32 %r10, [width];
    div.u32 %r11, %r4, %r10;
    rem.u32 %r12, %r4, %r10;
    mad.lo.s32 %r13, %r11, %r9, %r12;
    cvt.u64.u32 %rd3, %r13;
    cvta.to.global.u64 %rd1, %rd1;
    add.s64 %rd4, %rd1, %rd3;
    ld.global.u8 %r7, [%rd4];
    add.s32 %r8, %r7, %r6;
    st.global.u8 [%rd4], %r8;";

/// Follows a list of nodes (address of the next, value) from `from`, adds to each value, stores the sum of what the values
/// were, and their number.
const WALK: &str = "    mov.u32 %r7, 0;
    mov.u32 %r8, 0;
again:
    setp.eq.s64 %p2, %rd2, 0;
    @%p2 bra end;
    ld.u32 %r9, [%rd2+8];
    add.s32 %r7, %r7, %r9;
    add.s32 %r8, %r8, 1;
    add.s32 %r9, %r9, %r6;
    st.u32 [%rd2+8], %r9;
    ld.u64 %rd2, [%rd2];
    bra again;
end:
    st.u32 [%rd1], %r7;
    st.u32 [%rd1+4], %r8;";

/// Makes such a list of the nodes whose addresses are at `from`, which ends with 0; values are the index times `value`.
const LINK: &str = "    mul.wide.u32 %rd3, %r4, 8;
    add.s64 %rd4, %rd2, %rd3;
    ld.u64 %rd5, [%rd4];
    ld.u64 %rd6, [%rd4+8];
    st.u64 [%rd5], %rd6;
    mul.lo.s32 %r7, %r4, %r6;
    st.u32 [%rd5+8], %r7;";

/// Answers the letters of [`super::exchange`]: `value` rounds of `step` words.
const ANSWER: &str = "    ld.param.u32 %r9, [step];
    cvta.to.global.u64 %rd1, %rd1;
    mov.u32 %r7, 1;
round:
    setp.gt.u32 %p1, %r7, %r6;
    @%p1 bra done;
wait:
    ld.volatile.global.u32 %r8, [%rd1];
    setp.ne.u32 %p1, %r8, %r7;
    @%p1 bra wait;
    membar.sys;
    mov.u32 %r10, 0;
    add.s64 %rd4, %rd1, 64;
word:
    ld.volatile.global.u32 %r11, [%rd4];
    add.s32 %r11, %r11, 1;
    st.volatile.global.u32 [%rd4], %r11;
    add.s64 %rd4, %rd4, 4;
    add.s32 %r10, %r10, 1;
    setp.lt.u32 %p1, %r10, %r9;
    @%p1 bra word;
    atom.relaxed.sys.global.add.u32 %r12, [%rd1+8], 1;
    membar.sys;
    st.volatile.global.u32 [%rd1+4], %r7;
    add.s32 %r7, %r7, 1;
    bra round;";

pub fn ptx() -> String {
    [
        ".version 7.0\n.target sm_70\n.address_size 64\n".to_owned(),
        of_elements("bytes", "u8", 1),
        of_elements("words", "u32", 4),
        kernel("stride", STRIDE),
        kernel("walk", WALK),
        kernel("link", LINK),
        kernel("answer", ANSWER),
    ]
    .concat()
}

/// The parameters of a kernel; `count` threads.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Work {
    pub to: u64,
    pub from: u64,
    pub count: usize,
    pub value: u32,
    pub step: u32,
    pub width: u32,
}

/// The parameters as the kernels take them.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Params {
    pub to: u64,
    pub from: u64,
    pub count: u32,
    pub value: u32,
    pub step: u32,
    pub width: u32,
}

/// Offsets of the parameters, for launches with an array of pointers.
pub const OFFSETS: [usize; 6] = [0, 8, 16, 20, 24, 28];

impl From<&Work> for Params {
    fn from(work: &Work) -> Params {
        Params {
            to: work.to,
            from: work.from,
            count: u32::try_from(work.count).expect("a number of threads"),
            value: work.value,
            step: work.step,
            width: work.width,
        }
    }
}

impl Params {
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(self.to.to_le_bytes());
        bytes.extend(self.from.to_le_bytes());
        for word in [self.count, self.value, self.step, self.width] {
            bytes.extend(word.to_le_bytes());
        }
        bytes
    }
}

/// Threads of a block.
pub const THREADS: u32 = 128;

pub fn grid(count: usize) -> u32 {
    count.div_ceil(THREADS as usize) as u32
}

pub struct Kernels {
    pub module: CUmodule,
    pub add_bytes: CUfunction,
    pub copy_bytes: CUfunction,
    pub fill_bytes: CUfunction,
    pub add_words: CUfunction,
    pub copy_words: CUfunction,
    pub fill_words: CUfunction,
    pub stride: CUfunction,
    pub walk: CUfunction,
    pub link: CUfunction,
    pub answer: CUfunction,
}

impl Kernels {
    pub fn load() -> Outcome<Kernels> {
        let image = CString::new(ptx()).expect("no NUL");
        let mut module = CUmodule::NULL;
        must!(cuModuleLoadData, &mut module, image.as_ptr());
        let get = |name: &str| -> Outcome<CUfunction> {
            let name = CString::new(name).expect("no NUL");
            let mut function = CUfunction::NULL;
            must!(cuModuleGetFunction, &mut function, module, name.as_ptr());
            Ok(function)
        };
        Ok(Kernels {
            module,
            add_bytes: get("add_bytes")?,
            copy_bytes: get("copy_bytes")?,
            fill_bytes: get("fill_bytes")?,
            add_words: get("add_words")?,
            copy_words: get("copy_words")?,
            fill_words: get("fill_words")?,
            stride: get("stride")?,
            walk: get("walk")?,
            link: get("link")?,
            answer: get("answer")?,
        })
    }

    pub fn launch(&self, function: CUfunction, stream: CUstream, work: &Work) -> Outcome {
        if work.count == 0 {
            return Ok(());
        }
        let mut params = Params::from(work);
        let at = (&raw mut params).cast::<u8>();
        let mut pointers = OFFSETS.map(|offset| at.wrapping_add(offset).cast::<c_void>());
        must!(
            cuLaunchKernel,
            function,
            grid(work.count),
            1u32,
            1u32,
            THREADS,
            1u32,
            1u32,
            0u32,
            stream,
            pointers.as_mut_ptr(),
            nothing()
        );
        Ok(())
    }
}
