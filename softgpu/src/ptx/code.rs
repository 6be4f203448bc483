//! The form that kernels run in: instructions over numbered 64-bit registers.
//!
//! A register holds its value in the low bits; whoever reads it takes as many bits as its type has.
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

/// `Inst::n` of an operation whose `imm` is one more register.
pub const EXTRA_REGISTER: u8 = 255;

/// An operation on registers only.
pub type Alu = fn(Regs, &Inst);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Kind {
    Alu,
    /// To `imm`.
    Bra,
    BraIf,
    BraNot,
    /// To entry `a` of table `imm`.
    Brx,
    /// `d` = memory at `a` + `imm`, as `Width` number `n`.
    LdGlobal,
    LdShared,
    LdLocal,
    LdParam,
    /// Memory at `a` + `imm` = `b`.
    StGlobal,
    StShared,
    StLocal,
    /// Faults unless `a` + `imm` is a multiple of `n`.
    Align,
    /// Atomic number `imm` of the function.
    Atom,
    /// Meeting number `imm` of the function: other threads take part.
    Meet,
    /// Call number `imm` of the function.
    Call,
    Ret,
    Exit,
    /// `d` = clock number `n`.
    Clock,
    Fence,
    Sleep,
    /// Ends the launch with the status `imm`.
    Trap,
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

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Width {
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
}

impl Width {
    pub const ALL: [Width; 7] = [Width::U8, Width::U16, Width::U32, Width::U64, Width::S8, Width::S16, Width::S32];
    pub fn bytes(self) -> u64 {
        match self {
            Width::U8 | Width::S8 => 1,
            Width::U16 | Width::S16 => 2,
            Width::U32 | Width::S32 => 4,
            Width::U64 => 8,
        }
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
    WarpCount,
    LaneMask(LaneMask),
    SmCount,
    GridId,
    SharedBase,
    SharedSize,
    DynamicShared,
    DynamicSharedSize,
    LocalBase,
    LocalSize,
    ParamBase,
    ParamSize,
    FrameBase,
    Zero,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum LaneMask {
    Eq,
    Lt,
    Le,
    Gt,
    Ge,
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

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AtomType {
    U32,
    S32,
    U64,
    S64,
    F32,
    F64,
    U16,
}

#[derive(Clone, Copy)]
pub struct Atom {
    pub op: AtomOp,
    pub ty: AtomType,
    pub space: Space,
    pub d: u16,
    pub address: u16,
    pub offset: i32,
    pub b: u16,
    pub c: u16,
    pub slot: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reduce {
    Add,
    Min,
    Max,
    MinSigned,
    MaxSigned,
    And,
    Or,
    Xor,
}

/// What threads do together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Meeting {
    /// Whole block: barrier `id`; `count` threads (0: all that live).
    Barrier {
        id: u16,
        count: u16,
    },
    Arrive {
        id: u16,
        count: u16,
    },
    BarrierCount {
        d: u16,
        id: u16,
        count: u16,
        p: u16,
    },
    BarrierAll {
        d: u16,
        id: u16,
        count: u16,
        p: u16,
    },
    BarrierAny {
        d: u16,
        id: u16,
        count: u16,
        p: u16,
    },
    /// The lanes of `mask`.
    Warp {
        mask: u16,
    },
    Shuffle {
        mode: Shuffle,
        d: u16,
        p: u16,
        a: u16,
        b: u16,
        c: u16,
        mask: u16,
    },
    Ballot {
        d: u16,
        p: u16,
        mask: u16,
    },
    All {
        d: u16,
        p: u16,
        mask: u16,
    },
    Any {
        d: u16,
        p: u16,
        mask: u16,
    },
    Uniform {
        d: u16,
        p: u16,
        mask: u16,
    },
    MatchAny {
        d: u16,
        a: u16,
        mask: u16,
        wide: bool,
    },
    MatchAll {
        d: u16,
        p: u16,
        a: u16,
        mask: u16,
        wide: bool,
    },
    Redux {
        op: Reduce,
        d: u16,
        a: u16,
        mask: u16,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
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
    pub atoms: Vec<Atom>,
    pub meetings: Vec<Meeting>,
    pub calls: Vec<CallSite>,
    pub tables: Vec<Vec<u32>>,
    pub max_threads: u32,
    pub required_threads: Option<[u32; 3]>,
}

impl Function {
    /// Whether every register, branch and table that the code names exists: what the interpreter relies on.
    pub fn check(&self) -> bool {
        let reg = |r: u16| usize::from(r) < self.registers;
        let target = |t: u32| (t as usize) < self.code.len();
        // The last instruction never falls through, so the program counter stays inside.
        let ends = self.code.last().is_some_and(|i| matches!(i.kind, Kind::Exit | Kind::Ret));
        ends && self.code.len() == self.lines.len()
            && self.constants.iter().all(|c| reg(c.0))
            && self.specials.iter().all(|s| reg(s.0))
            && self.tables.iter().flatten().all(|&t| target(t))
            && self.atoms.iter().all(|x| [x.d, x.address, x.b, x.c].into_iter().all(reg))
            && self.meetings.iter().all(|m| m.registers().into_iter().all(reg))
            && self.code.iter().all(|i| {
                [i.d, i.a, i.b, i.c].into_iter().all(reg)
                    && match i.kind {
                        Kind::Alu if i.n == EXTRA_REGISTER => u16::try_from(i.imm).is_ok_and(reg),
                        Kind::Bra | Kind::BraIf | Kind::BraNot => target(i.imm as u32),
                        Kind::Brx => (i.imm as usize) < self.tables.len(),
                        Kind::Atom => (i.imm as usize) < self.atoms.len(),
                        Kind::Meet => (i.imm as usize) < self.meetings.len(),
                        Kind::Call => (i.imm as usize) < self.calls.len(),
                        Kind::LdGlobal
                        | Kind::LdShared
                        | Kind::LdLocal
                        | Kind::LdParam
                        | Kind::StGlobal
                        | Kind::StShared
                        | Kind::StLocal => usize::from(i.n) < Width::ALL.len(),
                        _ => true,
                    }
            })
    }
}

impl Meeting {
    fn registers(&self) -> [u16; 6] {
        match *self {
            Meeting::Barrier { id, count } | Meeting::Arrive { id, count } => [id, count, 0, 0, 0, 0],
            Meeting::BarrierCount { d, id, count, p }
            | Meeting::BarrierAll { d, id, count, p }
            | Meeting::BarrierAny { d, id, count, p } => [d, id, count, p, 0, 0],
            Meeting::Warp { mask } => [mask, 0, 0, 0, 0, 0],
            Meeting::Shuffle { d, p, a, b, c, mask, .. } => [d, p, a, b, c, mask],
            Meeting::Ballot { d, p, mask }
            | Meeting::All { d, p, mask }
            | Meeting::Any { d, p, mask }
            | Meeting::Uniform { d, p, mask } => [d, p, mask, 0, 0, 0],
            Meeting::MatchAny { d, a, mask, .. } | Meeting::Redux { d, a, mask, .. } => [d, a, mask, 0, 0, 0],
            Meeting::MatchAll { d, p, a, mask, .. } => [d, p, a, mask, 0, 0],
        }
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
    pub ptx_version: u32,
    pub target: u32,
}

impl Program {
    /// The index of the kernel called `name`.
    pub fn kernel(&self, name: &str) -> Option<usize> {
        self.functions.iter().position(|f| f.is_kernel && f.name == name)
    }
    /// Indices of the kernels, in the order of the text.
    pub fn kernels(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.functions.len()).filter(|&i| self.functions[i].is_kernel)
    }
    /// Whether the function, or one it calls, meets other threads.
    pub fn meets(&self, function: usize) -> bool {
        self.reaches(function, |f| !f.meetings.is_empty())
    }
    /// Whether `test` holds for the function or one that it can call.
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
