//! The form that kernels run in: instructions over numbered 64-bit registers.
//!
//! A register holds its value in the low bits; a reader takes as many bits as its type has.
//! Constants and special registers (thread index, block index, window bases) are ordinary registers that
//! are written before the function starts, so an operand is always a register number.

use std::collections::HashMap;

/// The registers of one function call.
#[derive(Clone, Copy)]
pub struct Regs(pub *mut u64);

impl Regs {
    #[inline(always)]
    pub fn get(self, index: u16) -> u64 {
        // SAFETY: instructions name only registers below their function's `registers`, which
        // `Function::check` verifies, and the interpreter gives each call that many.
        unsafe { *self.0.add(index as usize) }
    }
    #[inline(always)]
    pub fn set(self, index: u16, value: u64) {
        // SAFETY: as in `get`; one thread at a time runs on a register file.
        unsafe { *self.0.add(index as usize) = value }
    }
}

/// An operation on registers only.
pub type Alu = fn(Regs, &Inst);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Kind {
    Alu,
    /// As `Alu`, and `imm` is one more register.
    Alu4,
    /// To `imm`.
    Bra,
    BraIf,
    BraNot,
    /// `d` = memory at `a` + `imm`, of type number `n`.
    LdGlobal,
    LdShared,
    LdLocal,
    LdParam,
    /// Memory at `a` + `imm` = `b`, of type number `n`.
    StGlobal,
    StShared,
    StLocal,
    /// Faults unless `a` + `imm` is a multiple of `n`.
    Align,
    /// On memory at `a` + `imm`, with operands `b` and `c`: type number `n` % 16, operation `n` / 16.
    AtomGlobal,
    AtomShared,
    /// Meeting number `imm` of the function: other threads take part.
    Meet,
    /// Call number `imm` of the function.
    Call,
    Ret,
    Exit,
    /// `d` = nanoseconds: since the launch began, or (`n` = 1) by the clock of the day.
    Clock,
    Fence,
    Sleep,
    /// Ends the launch with the status `imm`.
    Trap,
    /// A failed assertion, number `imm`: ends the thread, and the launch after its block.
    Assert,
    /// Allocates from the heap, or frees: call number `imm`.
    Malloc,
    Free,
    /// Sets a condition of the graph: call number `imm`.
    Condition,
    /// Accesses a texture or surface: number `imm` of the function's `images`.
    Image,
}

#[derive(Clone, Copy)]
pub struct Inst {
    pub alu: Alu,
    pub kind: Kind,
    pub n: u8,
    /// Which remembered range this memory access looks at first.
    pub slot: u8,
    pub d: u16,
    pub a: u16,
    pub b: u16,
    pub c: u16,
    pub imm: i32,
}

/// The types of PTX; bits count as unsigned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ty {
    Pred,
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
    S64,
    F32,
    F64,
}

impl Ty {
    /// As `Inst::n` counts them.
    pub const ALL: [Ty; 11] = {
        use Ty::*;
        [Pred, U8, U16, U32, U64, S8, S16, S32, S64, F32, F64]
    };
    pub fn parse(name: &str) -> Option<Ty> {
        const NAMES: [&str; 11] = [
            "pred", "u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64", "f32", "f64",
        ];
        const BITS: [&str; 5] = ["", "b8", "b16", "b32", "b64"];
        let at = |names: &[&str]| names.iter().position(|n| *n == name);
        at(&NAMES)
            .or(at(&BITS[1..]).map(|n| n + 1))
            .map(|n| Ty::ALL[n])
    }
    pub fn bytes(self) -> u32 {
        match self {
            Ty::Pred | Ty::U8 | Ty::S8 => 1,
            Ty::U16 | Ty::S16 => 2,
            Ty::U32 | Ty::S32 | Ty::F32 => 4,
            Ty::U64 | Ty::S64 | Ty::F64 => 8,
        }
    }
    /// The unsigned type of the same size, for operations on bits.
    pub fn bits(self) -> Ty {
        [Ty::U8, Ty::U16, Ty::U32, Ty::U64][self.bytes().trailing_zeros() as usize]
    }
    pub fn is_signed(self) -> bool {
        matches!(self, Ty::S8 | Ty::S16 | Ty::S32 | Ty::S64)
    }
    pub fn is_float(self) -> bool {
        matches!(self, Ty::F32 | Ty::F64)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Space {
    Global,
    Shared,
    Local,
    Param,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Special {
    Tid(u8),
    Ntid(u8),
    Ctaid(u8),
    Nctaid(u8),
    LaneId,
    WarpId,
    /// Bit of the lane, and the bits below it.
    LaneBit,
    LanesBelow,
    SharedBase,
    DynamicShared,
    DynamicSharedSize,
    LocalBase,
    FrameBase,
    SmId,
    Zero,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AtomOp {
    Add,
    Min,
    Max,
    Exch,
    Cas,
    And,
    Or,
    Xor,
    Inc,
    Dec,
}

impl AtomOp {
    pub const ALL: [AtomOp; 10] = {
        use AtomOp::*;
        [Add, Min, Max, Exch, Cas, And, Or, Xor, Inc, Dec]
    };
}

/// What becomes of the predicates of threads that meet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Vote {
    Count,
    All,
    Any,
    Uniform,
    Ballot,
}

impl Vote {
    /// Of `all` threads it holds for `count`, in a warp for those of `mask`.
    pub fn result(self, count: usize, all: usize, mask: u64) -> u64 {
        match self {
            Vote::Count => count as u64,
            Vote::All => u64::from(count == all),
            Vote::Any => u64::from(count > 0),
            Vote::Uniform => u64::from(count == 0 || count == all),
            Vote::Ballot => mask,
        }
    }
}

/// What threads do together. `mask`, `id` and `count` are registers, too.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[rustfmt::skip]
pub enum Meeting {
    /// `count` threads of the block (0: all that live) at barrier `id`: `d` = vote on `p`.
    Barrier { id: u16, count: u16, vote: Vote, d: u16, p: u16 },
    /// The lanes of `mask`.
    Warp { mask: u16 },
    Vote { vote: Vote, d: u16, p: u16, mask: u16 },
    Shuffle { mode: Shuffle, d: u16, p: u16, a: u16, b: u16, c: u16, mask: u16 },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

/// How an access outside a surface ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outside {
    /// A fault.
    Trap,
    /// The nearest bytes are accessed.
    Clamp,
    /// Reads give 0, writes do nothing.
    Zero,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Of an element of a texture.
    Fetch,
    /// Of bytes of a surface.
    Load(Outside),
    Store(Outside),
}

/// An access to the texture or surface whose number is in register `object`.
pub struct Image {
    pub access: Access,
    pub object: u16,
    /// Registers of the coordinates: floating-point numbers (`at_float`) or whole ones.
    pub at: [u16; 2],
    pub at_float: bool,
    /// Registers that are read or written, each of type `ty`.
    pub data: Vec<u16>,
    pub ty: Ty,
}

/// A call: bytes go from the caller's frame to the callee's and, at its end, back.
pub struct CallSite {
    pub callee: usize,
    /// (offset in the caller's frame, offset in the callee's frame, bytes)
    pub arguments: Vec<(u32, u32, u32)>,
    pub results: Vec<(u32, u32, u32)>,
}

/// The value of a constant register.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub enum Constant {
    Bits(u64),
    /// So many bytes behind the start of the module's data.
    Data(u64),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Param {
    pub offset: u32,
    pub bytes: u32,
}

#[derive(Default)]
pub struct Function {
    pub name: String,
    pub is_kernel: bool,
    pub defined: bool,
    pub code: Vec<Inst>,
    /// The line of each instruction.
    pub lines: Vec<u32>,
    pub registers: usize,
    pub constants: Vec<(u16, Constant)>,
    pub specials: Vec<(u16, Special)>,
    pub params: Vec<Param>,
    pub results: Vec<Param>,
    pub param_bytes: u32,
    pub shared_bytes: u32,
    pub frame_bytes: u32,
    pub meetings: Vec<Meeting>,
    pub calls: Vec<CallSite>,
    /// Where in the frame message, file, line and function of each assertion are.
    pub assertions: Vec<[u32; 4]>,
    /// Where in the frame argument and result of each call of `malloc` or `free` are, or the arguments of
    /// `cudaGraphSetConditional`.
    pub heap_calls: Vec<[u32; 2]>,
    pub images: Vec<Image>,
    pub max_threads: u32,
    pub required_threads: Option<[u32; 3]>,
}

impl Function {
    /// Whether every register, branch and table that the code names exists: what the interpreter relies on.
    pub fn check(&self) -> bool {
        let reg = |r: u16| usize::from(r) < self.registers;
        // The last instruction never falls through, so the program counter stays inside.
        let ends = self
            .code
            .last()
            .is_some_and(|i| matches!(i.kind, Kind::Exit | Kind::Ret));
        let inside = |i: &Inst| match i.kind {
            Kind::Alu4 => u16::try_from(i.imm).is_ok_and(reg),
            Kind::Bra | Kind::BraIf | Kind::BraNot => (i.imm as usize) < self.code.len(),
            Kind::Meet => (i.imm as usize) < self.meetings.len(),
            Kind::Call => (i.imm as usize) < self.calls.len(),
            Kind::Image => (i.imm as usize) < self.images.len(),
            _ => true,
        };
        ends && self.code.len() == self.lines.len()
            && self.constants.iter().all(|c| reg(c.0))
            && self.specials.iter().all(|s| reg(s.0))
            && self.images.iter().all(|image| {
                let others = image.at.iter().chain(&image.data).copied();
                reg(image.object) && others.into_iter().all(reg)
            })
            && self
                .code
                .iter()
                .all(|i| [i.d, i.a, i.b, i.c].into_iter().all(reg) && inside(i))
    }
}

/// A variable of the module, in its data.
#[derive(Clone, Copy)]
pub struct Global {
    pub offset: u64,
    pub bytes: u64,
}

/// A module as parsed; where its data will lie is not fixed yet.
#[derive(Default)]
pub struct Program {
    pub functions: Vec<Function>,
    pub globals: HashMap<String, Global>,
    /// First content of the data.
    pub data: Vec<u8>,
    /// (place in the data, what to add to the data's address there): initialisers that are addresses.
    pub relocations: Vec<(u64, u64)>,
    pub target: u32,
}

impl Program {
    /// The index of the kernel called `name`.
    pub fn kernel(&self, name: &str) -> Option<usize> {
        self.functions
            .iter()
            .position(|f| f.is_kernel && f.name == name)
    }
    /// Indices of the kernels, in the order of the text.
    pub fn kernels(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.functions.len()).filter(|&i| self.functions[i].is_kernel)
    }
    /// Whether the function, or one it calls, meets other threads.
    pub fn meets(&self, function: usize) -> bool {
        self.reaches(function, |f| !f.meetings.is_empty())
    }
    /// Whether `test` holds for the function or any function that it can call.
    pub fn reaches(&self, function: usize, test: impl Fn(&Function) -> bool) -> bool {
        let (mut seen, mut todo) = (vec![false; self.functions.len()], vec![function]);
        while let Some(index) = todo.pop() {
            if std::mem::replace(&mut seen[index], true) {
                continue;
            }
            if test(&self.functions[index]) {
                return true;
            }
            todo.extend(self.functions[index].calls.iter().map(|c| c.callee));
        }
        false
    }
}
