//! Images that the program loads: their text, kernels and variables.

use crate::call;
use crate::calls::Status;
use mpsshim_api::cuda::*;
use std::ffi::{CStr, CString, c_void};
use std::ptr::null_mut;

/// Threads of a kernel work on words; each is the word's number.
const INDEX: &str = "
    .reg .pred %p;
    .reg .b32 %r<16>;
    .reg .b64 %rd<16>;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.s32 %r4, %r1, %r2, %r3;
    mul.wide.u32 %rd1, %r4, 4;
";

/// Bytes of the variable `table`.
pub const TABLE: usize = 256;
/// Words that `show` writes: `runs`, `table`, `factors`.
pub const SHOWN: usize = 1 + TABLE / 4 + 4;
/// Words of the variable `weights` of an image without code.
const WEIGHTS: usize = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// `to[i] = a + i * b`
    Fill,
    /// `to[i] += a`
    Add,
    /// `to[i] = from[i]`
    Copy,
    /// `to[i] = first[i] + second[i]`
    Sum,
    /// `to[i] = a * i ^ b`, with one parameter by value that has all.
    Record,
    /// Turns the words of each block of threads around, through dynamic shared memory.
    Reverse,
    /// Each thread adds `a` to `runs`.
    Count,
    /// `table[i] = a + i`
    Mark,
    /// Writes `runs`, `table` and `factors`.
    Show,
}

impl Kernel {
    pub const ALL: [Kernel; 9] = [
        Kernel::Fill,
        Kernel::Add,
        Kernel::Copy,
        Kernel::Sum,
        Kernel::Record,
        Kernel::Reverse,
        Kernel::Count,
        Kernel::Mark,
        Kernel::Show,
    ];

    fn name(self) -> &'static CStr {
        match self {
            Kernel::Fill => c"fill",
            Kernel::Add => c"add",
            Kernel::Copy => c"copy",
            Kernel::Sum => c"sum",
            Kernel::Record => c"record",
            Kernel::Reverse => c"reverse",
            Kernel::Count => c"count",
            Kernel::Mark => c"mark",
            Kernel::Show => c"show",
        }
    }

    /// Memory that it reads, beside the target.
    pub fn sources(self) -> usize {
        match self {
            Kernel::Copy => 1,
            Kernel::Sum => 2,
            _ => 0,
        }
    }

    pub fn has_target(self) -> bool {
        !matches!(self, Kernel::Count | Kernel::Mark)
    }

    /// Whether it uses variables of its image.
    pub fn has_variables(self) -> bool {
        matches!(self, Kernel::Count | Kernel::Mark | Kernel::Show)
    }
}

fn entry(name: &str, params: &str, body: &str) -> String {
    format!(".visible .entry {name}({params})\n{{{INDEX}{body}    ret;\n}}\n")
}

/// An image with all kernels; `number` makes its text, and what the variables hold at first, its own.
fn text(number: u32) -> String {
    let out = "
    ld.param.u64 %rd2, [to];
    ld.param.u32 %r5, [n];
    setp.ge.u32 %p, %r4, %r5;
    @%p bra out;
    add.s64 %rd3, %rd2, %rd1;
";
    let words = ".param .u64 to, .param .u32 n";
    let kernels = [
        entry(
            "fill",
            &format!("{words}, .param .u32 a, .param .u32 b"),
            &format!(
                "{out}
    ld.param.u32 %r6, [a];
    ld.param.u32 %r7, [b];
    mad.lo.s32 %r8, %r4, %r7, %r6;
    st.global.u32 [%rd3], %r8;
out:
"
            ),
        ),
        entry(
            "add",
            &format!("{words}, .param .u32 a"),
            &format!(
                "{out}
    ld.param.u32 %r6, [a];
    ld.global.u32 %r7, [%rd3];
    add.u32 %r7, %r7, %r6;
    st.global.u32 [%rd3], %r7;
out:
"
            ),
        ),
        entry(
            "copy",
            &format!("{words}, .param .u64 from"),
            &format!(
                "{out}
    ld.param.u64 %rd4, [from];
    add.s64 %rd5, %rd4, %rd1;
    ld.global.u32 %r6, [%rd5];
    st.global.u32 [%rd3], %r6;
out:
"
            ),
        ),
        entry(
            "sum",
            &format!("{words}, .param .u64 first, .param .u64 second"),
            &format!(
                "{out}
    ld.param.u64 %rd4, [first];
    add.s64 %rd5, %rd4, %rd1;
    ld.param.u64 %rd6, [second];
    add.s64 %rd7, %rd6, %rd1;
    ld.global.u32 %r6, [%rd5];
    ld.global.u32 %r7, [%rd7];
    add.u32 %r6, %r6, %r7;
    st.global.u32 [%rd3], %r6;
out:
"
            ),
        ),
        entry(
            "record",
            ".param .align 8 .b8 all[24]",
            "
    ld.param.u64 %rd2, [all];
    ld.param.u32 %r5, [all+8];
    ld.param.u32 %r6, [all+12];
    ld.param.u32 %r7, [all+16];
    setp.ge.u32 %p, %r4, %r5;
    @%p bra out;
    add.s64 %rd3, %rd2, %rd1;
    mul.lo.s32 %r8, %r4, %r6;
    xor.b32 %r8, %r8, %r7;
    st.global.u32 [%rd3], %r8;
out:
",
        ),
        entry(
            "reverse",
            ".param .u64 to",
            "
    ld.param.u64 %rd2, [to];
    add.s64 %rd3, %rd2, %rd1;
    ld.global.u32 %r5, [%rd3];
    shl.b32 %r6, %r3, 2;
    mov.u32 %r7, room;
    add.u32 %r8, %r7, %r6;
    st.shared.u32 [%r8], %r5;
    bar.sync 0;
    sub.u32 %r9, %r2, %r3;
    sub.u32 %r9, %r9, 1;
    shl.b32 %r9, %r9, 2;
    add.u32 %r10, %r7, %r9;
    ld.shared.u32 %r11, [%r10];
    st.global.u32 [%rd3], %r11;
",
        ),
        entry(
            "count",
            ".param .u32 a",
            "
    ld.param.u32 %r5, [a];
    mov.u64 %rd2, runs;
    atom.global.add.u32 %r6, [%rd2], %r5;
",
        ),
        entry(
            "mark",
            ".param .u32 a",
            "
    ld.param.u32 %r5, [a];
    mov.u64 %rd2, table;
    add.s64 %rd3, %rd2, %rd1;
    add.u32 %r6, %r5, %r4;
    st.global.u32 [%rd3], %r6;
",
        ),
        entry(
            "show",
            ".param .u64 to",
            "
    ld.param.u64 %rd2, [to];
    mov.u64 %rd3, runs;
    ld.global.u32 %r5, [%rd3];
    st.global.u32 [%rd2], %r5;
    mov.u64 %rd4, table;
    add.s64 %rd5, %rd4, %rd1;
    ld.global.u32 %r6, [%rd5];
    add.s64 %rd6, %rd2, %rd1;
    st.global.u32 [%rd6+4], %r6;
    setp.ge.u32 %p, %r4, 4;
    @%p bra out;
    mov.u64 %rd7, factors;
    add.s64 %rd8, %rd7, %rd1;
    ld.const.u32 %r7, [%rd8];
    st.global.u32 [%rd6+260], %r7;
out:
",
        ),
    ];
    let factors = factors(number).map(|word| word.to_string()).join(", ");
    format!(
        "
.version 7.0
.target sm_70
.address_size 64
.visible .global .align 4 .u32 runs = {};
.visible .global .align 4 .b8 table[{TABLE}];
.visible .const .align 4 .u32 factors[4] = {{{factors}}};
.extern .shared .align 16 .b8 room[];
{}",
        number % 1000,
        kernels.concat()
    )
}

fn factors(number: u32) -> [u32; 4] {
    [1, 2, 3, 4].map(|factor| factor * (number % 100_000))
}

/// An image without code: the server may give its variables memory of the program.
fn data(number: u32) -> String {
    format!(
        "
.version 7.0
.target sm_70
.address_size 64
.visible .global .align 256 .b8 weights[{}];
.visible .global .align 4 .u32 limits[2] = {{{}, 9}};
",
        4 * WEIGHTS,
        number % 1000
    )
}

fn bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

#[derive(Clone, Copy)]
enum Loaded {
    Module(CUmodule),
    Library(CUlibrary),
}

pub struct Image {
    loaded: Loaded,
    /// In the order of [`Kernel::ALL`]; none without code.
    functions: Vec<CUfunction>,
    /// The functions are kernels of a library.
    pub has_kernels: bool,
    /// The buffers of `runs`, `table` and `factors`, or of `weights` and `limits`.
    pub variables: Vec<u32>,
}

/// A variable's address, and its content at first.
pub struct Variable {
    pub name: &'static CStr,
    pub address: CUdeviceptr,
    pub content: Vec<u8>,
}

impl Image {
    /// # Errors
    /// A call's status.
    pub fn load(number: u32, is_library: bool, has_code: bool) -> Status<(Image, Vec<Variable>)> {
        let written = if has_code { text(number) } else { data(number) };
        let written = CString::new(written).expect("no NUL");
        let loaded = if is_library {
            let mut library = CUlibrary::NULL;
            let none = null_mut::<c_void>();
            call!(
                cuLibraryLoadData,
                &mut library,
                written.as_ptr(),
                none,
                none,
                0u32,
                none,
                none,
                0u32
            )?;
            Loaded::Library(library)
        } else {
            let mut module = CUmodule::NULL;
            call!(cuModuleLoadData, &mut module, written.as_ptr())?;
            Loaded::Module(module)
        };
        let functions = match has_code {
            true => functions(loaded, number)?,
            false => Vec::new(),
        };
        let first: Vec<(&'static CStr, Vec<u8>)> = match has_code {
            true => vec![
                (c"runs", bytes(&[number % 1000])),
                (c"table", vec![0; TABLE]),
                (c"factors", bytes(&factors(number))),
            ],
            false => vec![
                (c"weights", vec![0; 4 * WEIGHTS]),
                (c"limits", bytes(&[number % 1000, 9])),
            ],
        };
        let image = Image {
            loaded,
            functions,
            has_kernels: is_library && number.is_multiple_of(2),
            variables: Vec::new(),
        };
        let mut variables = Vec::new();
        for (name, content) in first {
            variables.push(Variable {
                name,
                address: image.address(name, content.len())?,
                content,
            });
        }
        Ok((image, variables))
    }

    /// Where the driver says that a variable is.
    ///
    /// # Errors
    /// A call's status, or a size that is not the variable's.
    pub fn address(&self, name: &CStr, len: usize) -> Status<CUdeviceptr> {
        let (mut place, mut found): (CUdeviceptr, usize) = (0, 0);
        let name = name.as_ptr();
        match self.loaded {
            Loaded::Module(module) => {
                call!(cuModuleGetGlobal_v2, &mut place, &mut found, module, name)?;
            }
            Loaded::Library(library) => {
                call!(cuLibraryGetGlobal, &mut place, &mut found, library, name)?;
            }
        }
        crate::calls::same(|| "size of a variable".into(), found, len)?;
        Ok(place)
    }

    pub fn has_code(&self) -> bool {
        !self.functions.is_empty()
    }

    pub fn function(&self, kernel: Kernel) -> CUfunction {
        let at = Kernel::ALL.iter().position(|one| *one == kernel);
        self.functions[at.expect("listed")]
    }

    pub fn unload(self) -> Status {
        match self.loaded {
            Loaded::Module(module) => call!(cuModuleUnload, module),
            Loaded::Library(library) => call!(cuLibraryUnload, library),
        }
    }
}

/// All functions. Those of a library are launched as kernels, or as functions of them, by the image's number.
fn functions(loaded: Loaded, number: u32) -> Status<Vec<CUfunction>> {
    let mut found = Vec::new();
    for kernel in Kernel::ALL {
        let name = kernel.name().as_ptr();
        let mut function = CUfunction::NULL;
        match loaded {
            Loaded::Module(module) => call!(cuModuleGetFunction, &mut function, module, name)?,
            Loaded::Library(library) => {
                let mut kernel = CUkernel::NULL;
                call!(cuLibraryGetKernel, &mut kernel, library, name)?;
                match number.is_multiple_of(2) {
                    true => function = CUfunction(kernel.0),
                    false => call!(cuKernelGetFunction, &mut function, kernel)?,
                }
            }
        }
        found.push(function);
    }
    Ok(found)
}
