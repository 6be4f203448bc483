//! The body of a function: statements in, instructions out.

use std::collections::HashMap;

use super::PtxError;
use super::code::*;
use super::lex::{Token, float, integer};
use super::parse::{Module, Reader, Result, declaration, place};
use super::select::{self, Mnemonic, Ty};

/// What a name stands for.
#[derive(Clone, Copy, Debug)]
pub enum Symbol {
    Reg(u16),
    /// Offset in the function's frame.
    Local(u32),
    /// Offset in the kernel's parameters.
    Param(u32),
    Shared(u32),
    DynamicShared,
    /// Offset in the module's data.
    Data(u64),
}

#[derive(Clone, Debug)]
enum Operand<'a> {
    Reg(u16),
    Int(u64),
    /// A literal with a fraction: its value and, if written as bits, those.
    Float(f64, Option<u64>),
    Symbol(Symbol, i64),
    /// `[base + offset]`.
    Memory(Base, i64),
    Vector(Vec<Operand<'a>>),
    /// A predicate to be inverted.
    Not(u16),
    /// A label or a function.
    Name(&'a str),
}

#[derive(Clone, Copy, Debug)]
enum Base {
    Reg(u16),
    Symbol(Symbol),
    None,
}

/// Where the number of a label's instruction belongs.
enum Fix {
    Branch(usize),
    Table(usize, usize),
}

#[derive(Default)]
struct Scope<'a> {
    names: HashMap<&'a str, Symbol>,
    /// `%r<9>`: prefix, first register, count.
    ranges: Vec<(&'a str, u16, u16)>,
    labels: HashMap<&'a str, u32>,
    tables: HashMap<&'a str, usize>,
    fixes: Vec<(Fix, &'a str, u32)>,
}

pub struct Body<'m, 'a> {
    module: &'m Module<'a>,
    f: Function,
    scopes: Vec<Scope<'a>>,
    constants: HashMap<Constant, u16>,
    specials: HashMap<Special, u16>,
    carry: Option<u16>,
    accesses: u8,
    line: u32,
}

fn nothing(_: Regs, _: &Inst) {}

const BLANK: Inst = Inst { alu: nothing, kind: Kind::Alu, n: 0, slot: 0, d: 0, a: 0, b: 0, c: 0, imm: 0 };

fn copy(r: Regs, i: &Inst) {
    r.set(i.d, r.get(i.a));
}

fn invert(r: Regs, i: &Inst) {
    r.set(i.d, (r.get(i.a) & 1) ^ 1);
}

fn add64(r: Regs, i: &Inst) {
    r.set(i.d, r.get(i.a).wrapping_add(r.get(i.b)));
}

fn sub64(r: Regs, i: &Inst) {
    r.set(i.d, r.get(i.a).wrapping_sub(r.get(i.b)));
}

fn below64(r: Regs, i: &Inst) {
    r.set(i.d, u64::from(r.get(i.a) < r.get(i.b)));
}

/// `n` bits of `a` from bit `imm` on.
fn unpack(r: Regs, i: &Inst) {
    r.set(i.d, r.get(i.a) >> i.imm & (u64::MAX >> (64 - i.n)));
}

/// `b` with `n` bits of `a` put in at bit `imm`.
fn pack(r: Regs, i: &Inst) {
    r.set(i.d, r.get(i.b) | (r.get(i.a) & (u64::MAX >> (64 - i.n))) << i.imm);
}

impl<'m, 'a> Body<'m, 'a> {
    pub fn new(f: Function, module: &'m Module<'a>) -> Self {
        let scopes = vec![Scope::default()];
        let mut body = Body {
            module,
            f,
            scopes,
            constants: HashMap::new(),
            specials: HashMap::new(),
            carry: None,
            accesses: 0,
            line: 0,
        };
        // Register 0 takes what nobody wants.
        body.f.registers = 1;
        body
    }

    pub fn declare(&mut self, name: &'a str, symbol: Symbol) {
        if let Some(scope) = self.scopes.last_mut() {
            scope.names.insert(name, symbol);
        }
    }

    fn fail<T>(&self, reason: impl Into<String>) -> Result<T> {
        Err(PtxError { line: self.line, reason: reason.into() })
    }

    fn registers(&mut self, count: u64) -> Result<u16> {
        let first = self.f.registers;
        if count > u64::from(u16::MAX) || first + count as usize > usize::from(u16::MAX) {
            return self.fail(format!("function `{}` has more than 65535 registers", self.f.name));
        }
        self.f.registers += count as usize;
        Ok(first as u16)
    }

    fn temporary(&mut self) -> Result<u16> {
        self.registers(1)
    }

    fn constant(&mut self, value: Constant) -> Result<u16> {
        if let Some(&reg) = self.constants.get(&value) {
            return Ok(reg);
        }
        let reg = self.registers(1)?;
        self.constants.insert(value, reg);
        self.f.constants.push((reg, value));
        Ok(reg)
    }

    fn special(&mut self, special: Special) -> Result<u16> {
        if let Some(&reg) = self.specials.get(&special) {
            return Ok(reg);
        }
        let reg = self.registers(1)?;
        self.specials.insert(special, reg);
        self.f.specials.push((reg, special));
        Ok(reg)
    }

    fn emit(&mut self, inst: Inst) -> usize {
        self.f.code.push(inst);
        self.f.lines.push(self.line);
        self.f.code.len() - 1
    }

    fn alu(&mut self, alu: Alu, d: u16, a: u16, b: u16) {
        self.emit(Inst { alu, d, a, b, ..BLANK });
    }

    /// Reads everything up to the function's closing brace.
    pub fn read(mut self, r: &mut Reader<'a>) -> Result<Function> {
        self.line = r.line();
        r.need('{')?;
        let mut depth = 1;
        while depth > 0 {
            self.line = r.line();
            if r.take('{') {
                depth += 1;
                if depth > 64 {
                    return self.fail("blocks are nested too deeply");
                }
                self.scopes.push(Scope::default());
            } else if r.take('}') {
                depth -= 1;
                self.close()?;
            } else if !r.take(';') {
                self.statement(r)?;
            }
        }
        Ok(self.f)
    }

    /// Resolves the labels of the innermost block; what is not defined in it belongs to the one around.
    fn close(&mut self) -> Result<()> {
        if self.scopes.len() == 1 {
            // A label may stand at the very end, and the last instruction must not fall through.
            let kind = if self.f.is_kernel { Kind::Exit } else { Kind::Ret };
            self.emit(Inst { kind, ..BLANK });
        }
        let Some(scope) = self.scopes.pop() else {
            return self.fail("`}` without `{`");
        };
        for (fix, label, line) in scope.fixes {
            match (scope.labels.get(label), self.scopes.last_mut()) {
                (Some(&target), _) => match fix {
                    Fix::Branch(at) => self.f.code[at].imm = target as i32,
                    Fix::Table(table, at) => self.f.tables[table][at] = target,
                },
                (None, Some(outer)) => outer.fixes.push((fix, label, line)),
                (None, None) => {
                    return Err(PtxError { line, reason: format!("no label `{label}`") });
                }
            }
        }
        Ok(())
    }

    fn lookup(&self, name: &str) -> Option<Symbol> {
        for scope in self.scopes.iter().rev() {
            if let Some(&symbol) = scope.names.get(name) {
                return Some(symbol);
            }
            for &(prefix, first, count) in &scope.ranges {
                if let Some(number) = name.strip_prefix(prefix).and_then(|n| n.parse::<u16>().ok())
                    && number < count
                {
                    return Some(Symbol::Reg(first + number));
                }
            }
        }
        self.module.names.get(name).copied()
    }

    fn statement(&mut self, r: &mut Reader<'a>) -> Result<()> {
        if let Some(Token::Word(word)) = r.peek() {
            if word.starts_with('.') {
                r.word()?;
                return self.directive(r, word);
            }
            if !word.is_empty() && self.is_label(r)? {
                return Ok(());
            }
        }
        let guard = if r.take('@') {
            let negated = r.take('!');
            let name = r.word()?;
            let Some(Symbol::Reg(reg)) = self.lookup(name) else {
                return self.fail(format!("unknown predicate `{name}`"));
            };
            Some((reg, negated))
        } else {
            None
        };
        self.line = r.line();
        let opcode = r.word()?;
        let m = Mnemonic::new(opcode);
        if m.base == "bra" {
            m.only(&["uni"]).map_or_else(|| self.unknown(opcode), Ok)?;
            let label = r.word()?;
            let kind = match guard {
                None => Kind::Bra,
                Some((_, false)) => Kind::BraIf,
                Some((_, true)) => Kind::BraNot,
            };
            self.branch(kind, guard.map_or(0, |g| g.0), label);
            return r.need(';');
        }
        let skip = guard.map(|(reg, negated)| {
            let kind = if negated { Kind::BraIf } else { Kind::BraNot };
            self.emit(Inst { kind, a: reg, ..BLANK })
        });
        if m.base == "call" {
            self.call(r)?;
        } else {
            let mut operands = Vec::new();
            while !r.is(';') {
                operands.push(self.operand(r)?);
                if !r.take(',') && !r.take('|') && !r.is(';') {
                    return r.fail(format!("`;` expected, found {}", r.shown()));
                }
            }
            self.instruction(&m, opcode, operands)?;
        }
        r.need(';')?;
        if let Some(at) = skip {
            self.f.code[at].imm = self.f.code.len() as i32;
        }
        Ok(())
    }

    fn branch(&mut self, kind: Kind, predicate: u16, label: &'a str) {
        let at = self.emit(Inst { kind, a: predicate, ..BLANK });
        let line = self.line;
        if let Some(scope) = self.scopes.last_mut() {
            scope.fixes.push((Fix::Branch(at), label, line));
        }
    }

    /// Takes `name:`, if that comes next, with the `.branchtargets` that may follow.
    fn is_label(&mut self, r: &mut Reader<'a>) -> Result<bool> {
        let Some(name) = r.label() else { return Ok(false) };
        let at = self.f.code.len() as u32;
        let table = self.f.tables.len();
        let Some(scope) = self.scopes.last_mut() else { return Ok(false) };
        if r.take_word(".branchtargets") {
            scope.tables.insert(name, table);
            self.f.tables.push(Vec::new());
            while !r.take(';') {
                let line = r.line();
                let target = r.word()?;
                scope.fixes.push((Fix::Table(table, self.f.tables[table].len()), target, line));
                self.f.tables[table].push(0);
                r.take(',');
            }
        } else if r.is_word(".callprototype") || r.is_word(".calltargets") {
            return r.fail("calls through a pointer are not supported");
        } else if scope.labels.insert(name, at).is_some() {
            return r.fail(format!("label `{name}` is defined twice"));
        }
        Ok(true)
    }

    fn directive(&mut self, r: &mut Reader<'a>, word: &str) -> Result<()> {
        match word {
            ".reg" => {
                let mut kind = r.word()?;
                if matches!(kind, ".v2" | ".v4") {
                    return r.fail("vector registers are not supported");
                }
                kind = kind.strip_prefix('.').unwrap_or(kind);
                if Ty::parse(kind).is_none() {
                    return r.fail(format!("unknown register type `.{kind}`"));
                }
                loop {
                    let name = r.word()?;
                    if r.take('<') {
                        let count = r.number()?;
                        r.need('>')?;
                        let first = self.registers(count)?;
                        if let Some(scope) = self.scopes.last_mut() {
                            scope.ranges.push((name, first, count as u16));
                        }
                    } else {
                        let reg = self.registers(1)?;
                        self.declare(name, Symbol::Reg(reg));
                    }
                    if !r.take(',') {
                        return r.need(';');
                    }
                }
            }
            ".local" | ".param" | ".shared" => {
                let var = declaration(r)?;
                let symbol = if var.open {
                    Symbol::DynamicShared
                } else {
                    let shared = word == ".shared";
                    let end = if shared { &mut self.f.shared_bytes } else { &mut self.f.frame_bytes };
                    match place(end, var.bytes, var.align) {
                        Some(at) if at < 1 << 24 && shared => {
                            if !self.f.is_kernel {
                                // Whoever calls this function keeps clear of its variables.
                                self.module.shared_bytes.set(self.f.shared_bytes);
                            }
                            Symbol::Shared(at)
                        }
                        Some(at) if at < 1 << 24 => Symbol::Local(at),
                        _ => return r.fail(format!("`{}` is too large", var.name)),
                    }
                };
                self.declare(var.name, symbol);
                r.need(';')
            }
            ".pragma" => {
                r.next()?;
                r.need(';')
            }
            ".extern" => {
                let word = r.word()?;
                self.directive(r, word)
            }
            _ => self.fail(format!("unknown directive `{word}`")),
        }
    }

    fn operand(&mut self, r: &mut Reader<'a>) -> Result<Operand<'a>> {
        if r.take('[') {
            let base = match r.peek() {
                Some(Token::Word(word)) if !word.starts_with(|c: char| c.is_ascii_digit()) => {
                    r.word()?;
                    match self.name(word)? {
                        Some(Symbol::Reg(reg)) => Base::Reg(reg),
                        Some(symbol) => Base::Symbol(symbol),
                        None => return self.fail(format!("unknown name `{word}`")),
                    }
                }
                _ => Base::None,
            };
            let mut offset = 0i64;
            while !r.take(']') {
                r.take('+');
                offset = offset.wrapping_add(r.number()? as i64);
            }
            return Ok(Operand::Memory(base, offset));
        }
        if r.take('{') {
            let mut parts = Vec::new();
            while !r.take('}') {
                parts.push(self.operand(r)?);
                r.take(',');
                if parts.len() > 8 {
                    return r.fail("a vector has at most 8 parts");
                }
            }
            return Ok(Operand::Vector(parts));
        }
        if r.take('!') {
            let name = r.word()?;
            return match self.name(name)? {
                Some(Symbol::Reg(reg)) => Ok(Operand::Not(reg)),
                _ => self.fail(format!("unknown predicate `{name}`")),
            };
        }
        let negative = r.take('-');
        let word = r.word()?;
        if word.starts_with(|c: char| c.is_ascii_digit()) {
            if let Some(v) = float(word) {
                let lower = word.to_ascii_lowercase();
                let bits = match &lower[..lower.len().min(2)] {
                    "0f" => Some(u64::from((v as f32).to_bits())),
                    "0d" => Some(v.to_bits()),
                    _ => None,
                };
                return Ok(if negative { Operand::Float(-v, None) } else { Operand::Float(v, bits) });
            }
            return match integer(word) {
                Some(v) => Ok(Operand::Int(if negative { v.wrapping_neg() } else { v })),
                None => r.fail(format!("`{word}` is no number")),
            };
        }
        match word {
            "_" => return Ok(Operand::Reg(0)),
            "WARP_SZ" => return Ok(Operand::Int(32)),
            _ => {}
        }
        match self.name(word)? {
            Some(Symbol::Reg(reg)) => Ok(Operand::Reg(reg)),
            Some(symbol) => {
                let offset = if r.take('+') { r.number()? as i64 } else { 0 };
                Ok(Operand::Symbol(symbol, offset))
            }
            None => Ok(Operand::Name(word)),
        }
    }

    /// A declared name or a special register.
    fn name(&mut self, word: &'a str) -> Result<Option<Symbol>> {
        if let Some(symbol) = self.lookup(word) {
            return Ok(Some(symbol));
        }
        let Some(special) = word.strip_prefix('%') else { return Ok(None) };
        let axis = |c: &str| match c {
            "x" => Some(0),
            "y" => Some(1),
            "z" => Some(2),
            _ => None,
        };
        let special = match special.split_once('.') {
            Some((base, c)) => axis(c).and_then(|n| {
                Some(match base {
                    "tid" => Special::Tid(n),
                    "ntid" => Special::Ntid(n),
                    "ctaid" | "clusterid" => Special::Ctaid(n),
                    "nctaid" | "nclusterid" => Special::Nctaid(n),
                    // A cluster is one block here.
                    "cluster_ctaid" => Special::Zero,
                    _ => return None,
                })
            }),
            None => match special {
                "laneid" => Some(Special::LaneId),
                "warpid" => Some(Special::WarpId),
                "nwarpid" => Some(Special::WarpCount),
                "smid" | "cluster_ctarank" => Some(Special::Zero),
                "nsmid" => Some(Special::SmCount),
                "gridid" => Some(Special::GridId),
                "lanemask_eq" => Some(Special::LaneMask(LaneMask::Eq)),
                "lanemask_lt" => Some(Special::LaneMask(LaneMask::Lt)),
                "lanemask_le" => Some(Special::LaneMask(LaneMask::Le)),
                "lanemask_gt" => Some(Special::LaneMask(LaneMask::Gt)),
                "lanemask_ge" => Some(Special::LaneMask(LaneMask::Ge)),
                "dynamic_smem_size" => Some(Special::DynamicSharedSize),
                "total_smem_size" => Some(Special::SharedSize),
                "clock" | "clock_hi" | "clock64" | "globaltimer" | "globaltimer_lo" | "globaltimer_hi" => {
                    let n = match special {
                        "clock" => 0,
                        "clock_hi" => 1,
                        "clock64" => 2,
                        "globaltimer" => 3,
                        "globaltimer_lo" => 4,
                        _ => 5,
                    };
                    let d = self.temporary()?;
                    self.emit(Inst { kind: Kind::Clock, n, d, ..BLANK });
                    return Ok(Some(Symbol::Reg(d)));
                }
                _ => None,
            },
        };
        match special {
            Some(special) => Ok(Some(Symbol::Reg(self.special(special)?))),
            None => self.fail(format!("unknown register `{word}`")),
        }
    }

    /// The register that holds an operand of type `ty`.
    fn value(&mut self, operand: &Operand<'a>, ty: Ty) -> Result<u16> {
        match *operand {
            Operand::Reg(reg) => Ok(reg),
            Operand::Int(v) => self.constant(Constant::Bits(v)),
            Operand::Float(v, bits) => {
                let value = match (ty, bits) {
                    (Ty::F32, _) => u64::from((v as f32).to_bits()),
                    (Ty::F64, _) => v.to_bits(),
                    (_, Some(bits)) => bits,
                    _ => return self.fail("a number with a fraction does not fit this type"),
                };
                self.constant(Constant::Bits(value))
            }
            Operand::Symbol(symbol, offset) => self.address_of(symbol, offset),
            Operand::Not(reg) => {
                let d = self.temporary()?;
                self.alu(invert, d, reg, 0);
                Ok(d)
            }
            Operand::Name(name) => self.fail(format!("unknown name `{name}`")),
            Operand::Memory(..) | Operand::Vector(_) => self.fail("a register or a number expected"),
        }
    }

    fn address_of(&mut self, symbol: Symbol, offset: i64) -> Result<u16> {
        let (base, at) = match symbol {
            Symbol::Reg(reg) => (reg, 0),
            Symbol::Data(at) => {
                return self.constant(Constant::Data(at.wrapping_add(offset as u64)));
            }
            Symbol::Shared(at) | Symbol::Param(at) => {
                return self.constant(Constant::Bits(u64::from(at).wrapping_add(offset as u64)));
            }
            Symbol::DynamicShared => (self.special(Special::DynamicShared)?, 0),
            Symbol::Local(at) => (self.special(Special::FrameBase)?, i64::from(at)),
        };
        let add = self.constant(Constant::Bits(at.wrapping_add(offset) as u64))?;
        let d = self.temporary()?;
        self.alu(add64, d, base, add);
        Ok(d)
    }

    fn destination(&mut self, operand: &Operand<'a>) -> Result<u16> {
        match *operand {
            Operand::Reg(reg) => Ok(reg),
            _ => self.fail("a register expected as destination"),
        }
    }

    /// An address as (register, what to add to it).
    fn memory(&mut self, operand: &Operand<'a>) -> Result<(u16, i32, Option<Symbol>)> {
        let Operand::Memory(base, offset) = *operand else { return self.fail("an address in brackets expected") };
        let (reg, add, symbol) = match base {
            Base::Reg(reg) => (reg, offset, None),
            Base::None => (self.special(Special::Zero)?, offset, None),
            Base::Symbol(symbol) => match symbol {
                Symbol::Local(at) => (self.special(Special::FrameBase)?, i64::from(at) + offset, Some(symbol)),
                Symbol::Param(at) | Symbol::Shared(at) => {
                    (self.special(Special::Zero)?, i64::from(at) + offset, Some(symbol))
                }
                _ => (self.address_of(symbol, 0)?, offset, Some(symbol)),
            },
        };
        match i32::try_from(add) {
            Ok(add) => Ok((reg, add, symbol)),
            Err(_) => {
                let add = self.constant(Constant::Bits(add as u64))?;
                let d = self.temporary()?;
                self.alu(add64, d, reg, add);
                Ok((d, 0, symbol))
            }
        }
    }

    fn space(&self, m: &Mnemonic<'_>, symbol: Option<Symbol>) -> Space {
        match (symbol, m.mods.iter().find_map(|m| space_name(m))) {
            (Some(Symbol::Local(_)), _) => Space::Local,
            (_, Some(Space::Param)) if !self.f.is_kernel => Space::Local,
            (Some(Symbol::Param(_)), _) => Space::Param,
            (Some(Symbol::Shared(_) | Symbol::DynamicShared), _) => Space::Shared,
            (_, Some(space)) => space,
            (_, None) => Space::Global,
        }
    }

    fn unknown<T>(&self, opcode: &str) -> Result<T> {
        self.fail(format!("unknown instruction `{opcode}`"))
    }

    fn call(&mut self, r: &mut Reader<'a>) -> Result<()> {
        let list = |body: &mut Self, r: &mut Reader<'a>| -> Result<Vec<u32>> {
            let mut out = Vec::new();
            r.need('(')?;
            while !r.take(')') {
                let name = r.word()?;
                let Some(Symbol::Local(at)) = body.lookup(name) else {
                    return r.fail(format!("`{name}` is no `.param` variable of this block"));
                };
                out.push(at);
                r.take(',');
            }
            Ok(out)
        };
        let results = if r.is('(') { list(self, r)? } else { Vec::new() };
        r.take(',');
        let name = r.word()?;
        let arguments = if r.take(',') { list(self, r)? } else { Vec::new() };
        if name == "__assertfail" {
            self.emit(Inst { kind: Kind::Trap, imm: 710, ..BLANK });
            return Ok(());
        }
        let Some(&callee) = self.module.functions.get(name) else {
            return self.fail(format!("call of `{name}`, which is no function of this module"));
        };
        let f = &self.module.program.functions[callee];
        if f.is_kernel || f.params.len() != arguments.len() || f.results.len() != results.len() {
            return self.fail(format!("call of `{name}` does not fit its declaration"));
        }
        let arguments = arguments.iter().zip(&f.params).map(|(&at, p)| (at, p.offset, p.bytes)).collect();
        let results = results.iter().zip(&f.results).map(|(&at, p)| (at, p.offset, p.bytes)).collect();
        self.f.calls.push(CallSite { callee, arguments, results });
        self.emit(Inst { kind: Kind::Call, imm: self.f.calls.len() as i32 - 1, ..BLANK });
        Ok(())
    }

    fn instruction(&mut self, m: &Mnemonic<'_>, opcode: &str, ops: Vec<Operand<'a>>) -> Result<()> {
        let count = |n: std::ops::RangeInclusive<usize>| {
            if n.contains(&ops.len()) { Ok(()) } else { self.fail(format!("`{opcode}` with {} operands", ops.len())) }
        };
        match m.base {
            "ret" => {
                let kind = if self.f.is_kernel { Kind::Exit } else { Kind::Ret };
                self.emit(Inst { kind, ..BLANK });
            }
            "exit" => {
                self.emit(Inst { kind: Kind::Exit, ..BLANK });
            }
            "trap" | "brkpt" => {
                self.emit(Inst { kind: Kind::Trap, imm: 719, ..BLANK });
            }
            "membar" | "fence" => {
                self.emit(Inst { kind: Kind::Fence, ..BLANK });
            }
            "nanosleep" => {
                count(1..=1)?;
                let a = self.value(&ops[0], Ty::U32)?;
                self.emit(Inst { kind: Kind::Sleep, a, ..BLANK });
            }
            // Hints without effect on results.
            "prefetch" | "prefetchu" | "applypriority" | "griddepcontrol" | "pmevent" => {}
            "mov" => {
                count(2..=2)?;
                self.mov(m, opcode, &ops)?;
            }
            "ld" | "ldu" => {
                count(2..=3)?;
                self.load(m, opcode, &ops)?;
            }
            "st" => {
                count(2..=3)?;
                self.store(m, opcode, &ops)?;
            }
            "cvta" => {
                count(2..=2)?;
                let d = self.destination(&ops[0])?;
                let a = self.value(&ops[1], Ty::U64)?;
                let Some(space) = m.mods.iter().find_map(|m| space_name(m)) else { return self.unknown(opcode) };
                match self.window(space)? {
                    Some((base, _)) => self.alu(if m.has("to") { sub64 } else { add64 }, d, a, base),
                    None => self.alu(copy, d, a, 0),
                }
            }
            "isspacep" => {
                count(2..=2)?;
                let d = self.destination(&ops[0])?;
                let a = self.value(&ops[1], Ty::U64)?;
                let Some(space) = m.mods.iter().find_map(|m| space_name(m)) else { return self.unknown(opcode) };
                if m.has("const") {
                    return self.unknown(opcode);
                }
                let (in_any, t) = (self.temporary()?, self.temporary()?);
                let tests = if space == Space::Global { vec![Space::Shared, Space::Local] } else { vec![space] };
                let zero = self.special(Special::Zero)?;
                self.alu(copy, in_any, zero, 0);
                for space in tests {
                    if let Some((base, size)) = self.window(space)? {
                        self.alu(sub64, t, a, base);
                        self.alu(below64, t, t, size);
                        self.alu(|r, i| r.set(i.d, r.get(i.a) | r.get(i.b)), in_any, in_any, t);
                    }
                }
                self.alu(if space == Space::Global { invert } else { copy }, d, in_any, 0);
            }
            "cvt" => self.cvt(m, opcode, &ops)?,
            "setp" => {
                count(3..=5)?;
                self.setp(m, opcode, &ops)?;
            }
            "set" => {
                count(3..=3)?;
                let (&[to, from], d) = (&m.types[..], self.destination(&ops[0])?) else { return self.unknown(opcode) };
                let Some(compare) = (match &m.mods[..] {
                    [how] | [how, "ftz"] => select::compare(how, from, m.has("ftz")),
                    _ => None,
                }) else {
                    return self.unknown(opcode);
                };
                let (a, b) = (self.value(&ops[1], from)?, self.value(&ops[2], from)?);
                self.alu(compare, d, a, b);
                match to {
                    Ty::F32 => self.alu(|r, i| r.set(i.d, r.get(i.a) * 0x3F80_0000), d, d, 0),
                    Ty::U32 | Ty::S32 => self.alu(|r, i| r.set(i.d, r.get(i.a) * 0xFFFF_FFFF), d, d, 0),
                    _ => return self.unknown(opcode),
                }
            }
            "brx" => {
                count(2..=2)?;
                let a = self.value(&ops[0], Ty::U32)?;
                let Operand::Name(name) = ops[1] else { return self.unknown(opcode) };
                let Some(&table) = self.scopes.iter().rev().find_map(|s| s.tables.get(name)) else {
                    return self.fail(format!("no branch targets `{name}`"));
                };
                self.emit(Inst { kind: Kind::Brx, a, imm: table as i32, ..BLANK });
            }
            "bar" | "barrier" => self.barrier(m, opcode, &ops)?,
            "shfl" | "vote" | "match" | "redux" => self.warp(m, opcode, &ops)?,
            "activemask" => {
                count(1..=1)?;
                // A lane is sure of itself only: threads run one after the other.
                let d = self.destination(&ops[0])?;
                let a = self.special(Special::LaneMask(LaneMask::Eq))?;
                self.alu(copy, d, a, 0);
            }
            "atom" | "red" => self.atom(m, opcode, &ops)?,
            _ => self.arithmetic(m, opcode, &ops)?,
        }
        Ok(())
    }

    /// Base and size registers of a space that is a window of the generic one.
    fn window(&mut self, space: Space) -> Result<Option<(u16, u16)>> {
        let space = if space == Space::Param && !self.f.is_kernel { Space::Local } else { space };
        let (base, size) = match space {
            Space::Global => return Ok(None),
            Space::Shared => (Special::SharedBase, Special::SharedSize),
            Space::Local => (Special::LocalBase, Special::LocalSize),
            Space::Param => (Special::ParamBase, Special::ParamSize),
        };
        Ok(Some((self.special(base)?, self.special(size)?)))
    }

    fn mov(&mut self, m: &Mnemonic<'_>, opcode: &str, ops: &[Operand<'a>]) -> Result<()> {
        let (Some(ty), true) = (m.ty(), m.mods.is_empty()) else { return self.unknown(opcode) };
        match (&ops[0], &ops[1]) {
            (Operand::Vector(parts), source) => {
                let a = self.value(source, ty)?;
                let bits = ty.bytes() * 8 / parts.len().max(1) as u32;
                if !bits.is_power_of_two() || bits < 8 {
                    return self.unknown(opcode);
                }
                for (n, part) in parts.iter().enumerate() {
                    let d = self.destination(part)?;
                    self.emit(Inst { alu: unpack, n: bits as u8, d, a, imm: (n as u32 * bits) as i32, ..BLANK });
                }
            }
            (d, Operand::Vector(parts)) => {
                let d = self.destination(d)?;
                let bits = ty.bytes() * 8 / parts.len().max(1) as u32;
                if !bits.is_power_of_two() || bits < 8 {
                    return self.unknown(opcode);
                }
                let mut sum = self.special(Special::Zero)?;
                for (n, part) in parts.iter().enumerate() {
                    let a = self.value(part, ty)?;
                    let t = if n + 1 == parts.len() { d } else { self.temporary()? };
                    self.emit(Inst {
                        alu: pack,
                        n: bits as u8,
                        d: t,
                        a,
                        b: sum,
                        imm: (n as u32 * bits) as i32,
                        ..BLANK
                    });
                    sum = t;
                }
            }
            (d, source) => {
                let d = self.destination(d)?;
                let a = self.value(source, ty)?;
                self.alu(copy, d, a, 0);
            }
        }
        Ok(())
    }

    fn check_access(&self, m: &Mnemonic<'_>, opcode: &str) -> Result<Ty> {
        for name in &m.mods {
            let known = matches!(
                *name,
                "volatile"
                    | "relaxed"
                    | "acquire"
                    | "release"
                    | "weak"
                    | "acq_rel"
                    | "mmio"
                    | "sys"
                    | "gpu"
                    | "cta"
                    | "cluster"
                    | "ca"
                    | "cg"
                    | "cs"
                    | "lu"
                    | "cv"
                    | "wb"
                    | "wt"
                    | "nc"
                    | "unified"
                    | "v2"
                    | "v4"
                    | "v8"
            );
            if !known && space_name(name).is_none() && !name.starts_with("L1::") && !name.starts_with("L2::") {
                return self.unknown(opcode);
            }
        }
        match m.ty() {
            Some(ty) if ty != Ty::Pred && m.types.len() == 1 => Ok(ty),
            _ => self.unknown(opcode),
        }
    }

    fn slot(&mut self) -> u8 {
        self.accesses = self.accesses.wrapping_add(1);
        self.accesses
    }

    /// Makes a vector access fault unless it is aligned as a whole.
    fn align(&mut self, parts: usize, ty: Ty, reg: u16, add: i32) {
        if parts > 1 {
            let n = (parts as u32 * ty.bytes()) as u8;
            self.emit(Inst { kind: Kind::Align, n, a: reg, imm: add, ..BLANK });
        }
    }

    fn load(&mut self, m: &Mnemonic<'_>, opcode: &str, ops: &[Operand<'a>]) -> Result<()> {
        let ty = self.check_access(m, opcode)?;
        let (mut reg, add, symbol) = self.memory(&ops[1])?;
        let kind = match self.space(m, symbol) {
            Space::Global => Kind::LdGlobal,
            Space::Shared => Kind::LdShared,
            Space::Local => Kind::LdLocal,
            Space::Param => Kind::LdParam,
        };
        let width = match ty {
            Ty::S8 => Width::S8,
            Ty::S16 => Width::S16,
            Ty::S32 => Width::S32,
            _ => [Width::U8, Width::U16, Width::U32, Width::U64][ty.bytes().trailing_zeros() as usize],
        };
        let parts = match &ops[0] {
            Operand::Vector(parts) => parts.iter().map(|p| self.destination(p)).collect::<Result<Vec<_>>>()?,
            one => vec![self.destination(one)?],
        };
        if parts.len() > 1 && parts.contains(&reg) {
            let t = self.temporary()?;
            self.alu(copy, t, reg, 0);
            reg = t;
        }
        self.align(parts.len(), ty, reg, add);
        for (n, d) in parts.into_iter().enumerate() {
            let (slot, imm) = (self.slot(), add.wrapping_add((n as u32 * ty.bytes()) as i32));
            self.emit(Inst { kind, n: width as u8, slot, d, a: reg, imm, ..BLANK });
        }
        Ok(())
    }

    fn store(&mut self, m: &Mnemonic<'_>, opcode: &str, ops: &[Operand<'a>]) -> Result<()> {
        let ty = self.check_access(m, opcode)?;
        let (reg, add, symbol) = self.memory(&ops[0])?;
        let kind = match self.space(m, symbol) {
            Space::Global => Kind::StGlobal,
            Space::Shared => Kind::StShared,
            Space::Local => Kind::StLocal,
            Space::Param => return self.fail("a kernel's parameters cannot be written"),
        };
        let width = [Width::U8, Width::U16, Width::U32, Width::U64][ty.bytes().trailing_zeros() as usize];
        let parts = match &ops[1] {
            Operand::Vector(parts) => parts.iter().map(|p| self.value(p, ty)).collect::<Result<Vec<_>>>()?,
            one => vec![self.value(one, ty)?],
        };
        self.align(parts.len(), ty, reg, add);
        for (n, b) in parts.into_iter().enumerate() {
            let (slot, imm) = (self.slot(), add.wrapping_add((n as u32 * ty.bytes()) as i32));
            self.emit(Inst { kind, n: width as u8, slot, a: reg, b, imm, ..BLANK });
        }
        Ok(())
    }

    fn cvt(&mut self, m: &Mnemonic<'_>, opcode: &str, ops: &[Operand<'a>]) -> Result<()> {
        if let (Some(half), 3) = (m.ty().and_then(Ty::half), ops.len()) {
            // Two singles into a packed pair, the first one on top.
            let one = Mnemonic { base: m.base, mods: m.mods.clone(), types: vec![half, Ty::F32] };
            let (high, low, d) = (self.temporary()?, self.temporary()?, self.destination(&ops[0])?);
            self.cvt(&one, opcode, &[Operand::Reg(high), ops[1].clone()])?;
            self.cvt(&one, opcode, &[Operand::Reg(low), ops[2].clone()])?;
            self.emit(Inst { alu: pack, n: 16, d, a: high, b: low, imm: 16, ..BLANK });
            return Ok(());
        }
        let Some((steps, imm)) = select::convert(m) else { return self.unknown(opcode) };
        if ops.len() != 2 {
            return self.unknown(opcode);
        }
        let d = self.destination(&ops[0])?;
        let mut a = self.value(&ops[1], m.types[1])?;
        for alu in steps {
            self.emit(Inst { alu, d, a, imm, ..BLANK });
            a = d;
        }
        Ok(())
    }

    fn setp(&mut self, m: &Mnemonic<'_>, opcode: &str, ops: &[Operand<'a>]) -> Result<()> {
        let joined = m.mods.iter().position(|m| matches!(*m, "and" | "or" | "xor"));
        if m.mods.iter().skip(1).any(|m| !matches!(*m, "and" | "or" | "xor" | "ftz")) || m.types.len() != 1 {
            return self.unknown(opcode);
        }
        let two = ops.len() == 4 + usize::from(joined.is_some());
        let (Some(ty), false) = (m.ty(), ops.len() < 3 + usize::from(joined.is_some())) else {
            return self.unknown(opcode);
        };
        let Some(compare) = m.mods.first().and_then(|c| select::compare(c, ty, m.has("ftz"))) else {
            return self.unknown(opcode);
        };
        let p = self.destination(&ops[0])?;
        let q = if two { Some(self.destination(&ops[1])?) } else { None };
        let rest = &ops[1 + usize::from(two)..];
        let (a, b) = (self.value(&rest[0], ty)?, self.value(&rest[1], ty)?);
        if joined.is_none() && q.is_none() {
            self.alu(compare, p, a, b);
            return Ok(());
        }
        let t = self.temporary()?;
        self.alu(compare, t, a, b);
        let logic = joined
            .and_then(|at| select::logic(Ty::Pred, ["and", "or", "xor"].iter().position(|n| *n == m.mods[at])? as u8));
        let c = if joined.is_some() { Some(self.value(&rest[2], Ty::Pred)?) } else { None };
        // `c` may be one of the destinations: both results are made before either is stored.
        let results = [p, q.unwrap_or(0)].map(|d| (d, self.temporary()));
        for (n, (_, out)) in results.iter().enumerate() {
            let out = out.clone()?;
            self.alu(if n == 1 { invert } else { copy }, out, t, 0);
            if let (Some(logic), Some(c)) = (logic, c) {
                self.alu(logic, out, out, c);
            }
        }
        for (d, out) in results {
            self.alu(copy, d, out?, 0);
        }
        Ok(())
    }

    fn barrier(&mut self, m: &Mnemonic<'_>, opcode: &str, ops: &[Operand<'a>]) -> Result<()> {
        if m.only(&["sync", "arrive", "red", "warp", "cta", "aligned", "popc", "and", "or"]).is_none() {
            return self.unknown(opcode);
        }
        let mut args = ops.iter();
        let mut next = |body: &mut Self, ty: Ty| match args.next() {
            Some(op) => body.value(op, ty),
            None => body.special(Special::Zero),
        };
        let meeting = if m.has("warp") {
            Meeting::Warp { mask: next(self, Ty::U32)? }
        } else if m.has("red") {
            if !(3..=4).contains(&ops.len()) {
                return self.unknown(opcode);
            }
            let d = self.destination(&ops[0])?;
            let id = self.value(&ops[1], Ty::U32)?;
            let count = if ops.len() == 4 { self.value(&ops[2], Ty::U32)? } else { self.special(Special::Zero)? };
            let p = self.value(&ops[ops.len() - 1], Ty::Pred)?;
            match m.mods.iter().find(|m| matches!(**m, "popc" | "and" | "or")) {
                Some(&"popc") => Meeting::BarrierCount { d, id, count, p },
                Some(&"and") => Meeting::BarrierAll { d, id, count, p },
                Some(_) => Meeting::BarrierAny { d, id, count, p },
                None => return self.unknown(opcode),
            }
        } else {
            let (id, count) = (next(self, Ty::U32)?, next(self, Ty::U32)?);
            if m.has("arrive") {
                Meeting::Arrive { id, count }
            } else if m.has("sync") {
                Meeting::Barrier { id, count }
            } else {
                return self.unknown(opcode);
            }
        };
        self.meet(meeting);
        Ok(())
    }

    fn meet(&mut self, meeting: Meeting) {
        self.f.meetings.push(meeting);
        self.emit(Inst { kind: Kind::Meet, imm: self.f.meetings.len() as i32 - 1, ..BLANK });
    }

    fn warp(&mut self, m: &Mnemonic<'_>, opcode: &str, ops: &[Operand<'a>]) -> Result<()> {
        if !m.has("sync") || ops.len() < 3 {
            return self.unknown(opcode);
        }
        let d = self.destination(&ops[0])?;
        let mask = self.value(&ops[ops.len() - 1], Ty::U32)?;
        let wide = m.ty() == Some(Ty::U64);
        let meeting = match (m.base, ops.len()) {
            ("shfl", 5 | 6) => {
                let mode = match m.mods.iter().find(|m| **m != "sync") {
                    Some(&"up") => Shuffle::Up,
                    Some(&"down") => Shuffle::Down,
                    Some(&"bfly") => Shuffle::Butterfly,
                    Some(&"idx") => Shuffle::Index,
                    _ => return self.unknown(opcode),
                };
                let p = if ops.len() == 6 { self.destination(&ops[1])? } else { 0 };
                let [a, b, c] = [4, 3, 2].map(|back| self.value(&ops[ops.len() - back], Ty::U32));
                Meeting::Shuffle { mode, d, p, a: a?, b: b?, c: c?, mask }
            }
            ("vote", 3) => {
                let p = self.value(&ops[1], Ty::Pred)?;
                match m.mods.iter().find(|m| **m != "sync") {
                    Some(&"ballot") => Meeting::Ballot { d, p, mask },
                    Some(&"all") => Meeting::All { d, p, mask },
                    Some(&"any") => Meeting::Any { d, p, mask },
                    Some(&"uni") => Meeting::Uniform { d, p, mask },
                    _ => return self.unknown(opcode),
                }
            }
            ("match", 3) if m.has("any") => Meeting::MatchAny { d, a: self.value(&ops[1], Ty::U64)?, mask, wide },
            ("match", 3) if m.has("all") => Meeting::MatchAll { d, p: 0, a: self.value(&ops[1], Ty::U64)?, mask, wide },
            ("match", 4) if m.has("all") => {
                Meeting::MatchAll { d, p: self.destination(&ops[1])?, a: self.value(&ops[2], Ty::U64)?, mask, wide }
            }
            ("redux", 3) => {
                let signed = m.ty() == Some(Ty::S32);
                let op = match m.mods.iter().find(|m| **m != "sync") {
                    Some(&"add") => Reduce::Add,
                    Some(&"min") if signed => Reduce::MinSigned,
                    Some(&"max") if signed => Reduce::MaxSigned,
                    Some(&"min") => Reduce::Min,
                    Some(&"max") => Reduce::Max,
                    Some(&"and") => Reduce::And,
                    Some(&"or") => Reduce::Or,
                    Some(&"xor") => Reduce::Xor,
                    _ => return self.unknown(opcode),
                };
                if m.ty().is_none_or(Ty::is_float) {
                    return self.unknown(opcode);
                }
                Meeting::Redux { op, d, a: self.value(&ops[1], Ty::U32)?, mask }
            }
            _ => return self.unknown(opcode),
        };
        self.meet(meeting);
        Ok(())
    }

    fn atom(&mut self, m: &Mnemonic<'_>, opcode: &str, ops: &[Operand<'a>]) -> Result<()> {
        let found = m.mods.iter().find_map(|name| {
            Some(match *name {
                "add" => AtomOp::Add,
                "min" => AtomOp::Min,
                "max" => AtomOp::Max,
                "exch" => AtomOp::Exch,
                "cas" => AtomOp::Cas,
                "and" => AtomOp::And,
                "or" => AtomOp::Or,
                "xor" => AtomOp::Xor,
                "inc" => AtomOp::Inc,
                "dec" => AtomOp::Dec,
                _ => return None,
            })
        });
        let ty = match m.ty() {
            Some(Ty::U32) => AtomType::U32,
            Some(Ty::S32) => AtomType::S32,
            Some(Ty::U64) => AtomType::U64,
            Some(Ty::S64) => AtomType::S64,
            Some(Ty::F32) => AtomType::F32,
            Some(Ty::F64) => AtomType::F64,
            Some(Ty::U16) => AtomType::U16,
            _ => return self.unknown(opcode),
        };
        let Some(op) = found else { return self.unknown(opcode) };
        let known = |m: &str| {
            let order = ["relaxed", "acquire", "release", "acq_rel", "volatile", "cta", "cluster", "gpu", "sys"];
            let ops = ["add", "min", "max", "exch", "cas", "and", "or", "xor", "inc", "dec"];
            order.contains(&m) || ops.contains(&m) || space_name(m).is_some() || m.starts_with("L2::")
        };
        if !m.mods.iter().all(|m| known(m)) {
            return self.unknown(opcode);
        }
        let float_only_adds = matches!(ty, AtomType::F32 | AtomType::F64) && op != AtomOp::Add && op != AtomOp::Exch;
        let gives = usize::from(m.base == "atom");
        let inputs = if op == AtomOp::Cas { 2 } else { 1 };
        if float_only_adds
            || ty == AtomType::U16 && op != AtomOp::Cas
            || m.has("v2")
            || m.has("v4")
            || ops.len() < gives + 1 + inputs
        {
            return self.unknown(opcode);
        }
        let d = if gives == 1 { self.destination(&ops[0])? } else { 0 };
        let (address, offset, symbol) = self.memory(&ops[gives])?;
        let space = self.space(m, symbol);
        let operand = m.types[0];
        let b = self.value(&ops[gives + 1], operand)?;
        let c = if inputs == 2 { self.value(&ops[gives + 2], operand)? } else { 0 };
        let slot = self.slot();
        self.f.atoms.push(Atom { op, ty, space, d, address, offset, b, c, slot });
        self.emit(Inst { kind: Kind::Atom, imm: self.f.atoms.len() as i32 - 1, ..BLANK });
        Ok(())
    }

    fn arithmetic(&mut self, m: &Mnemonic<'_>, opcode: &str, ops: &[Operand<'a>]) -> Result<()> {
        // A packed pair is computed half by half.
        if let Some(half) = m.ty().and_then(Ty::half) {
            let one = Mnemonic { base: m.base, mods: m.mods.clone(), types: vec![half] };
            if ops.is_empty() || select::alu(&one).is_none() {
                return self.unknown(opcode);
            }
            let d = self.destination(&ops[0])?;
            let mut outs = [0; 2];
            for (n, out) in outs.iter_mut().enumerate() {
                *out = self.temporary()?;
                let mut parts = vec![Operand::Reg(*out)];
                for op in &ops[1..] {
                    let (a, t) = (self.value(op, Ty::U32)?, self.temporary()?);
                    self.emit(Inst { alu: unpack, n: 16, d: t, a, imm: 16 * n as i32, ..BLANK });
                    parts.push(Operand::Reg(t));
                }
                self.arithmetic(&one, opcode, &parts)?;
            }
            let zero = self.special(Special::Zero)?;
            self.emit(Inst { alu: pack, n: 16, d: outs[0], a: outs[0], b: zero, ..BLANK });
            self.emit(Inst { alu: pack, n: 16, d, a: outs[1], b: outs[0], imm: 16, ..BLANK });
            return Ok(());
        }
        let (Some(selected), Some(ty)) = (select::alu(m), m.ty()) else { return self.unknown(opcode) };
        let lut = usize::from(m.base == "lop3");
        if ops.len() != 1 + selected.sources + lut {
            return self.fail(format!("`{opcode}` with {} operands", ops.len()));
        }
        let d = self.destination(&ops[0])?;
        let mut inst = Inst { alu: selected.alu, d, imm: selected.imm, ..BLANK };
        for (n, op) in ops[1..=selected.sources].iter().enumerate() {
            let source = match (m.base, n) {
                ("selp", 2) => Ty::Pred,
                ("slct", 2) => m.types[1],
                _ => ty,
            };
            let reg = self.value(op, source)?;
            match n {
                0 => inst.a = reg,
                1 => inst.b = reg,
                2 => inst.c = reg,
                _ => (inst.imm, inst.n) = (i32::from(reg), EXTRA_REGISTER),
            }
        }
        if lut == 1 {
            let Operand::Int(table) = ops[4] else { return self.fail("`lop3` needs a number as its table") };
            inst.imm = table as i32 & 0xFF;
        }
        if selected.carry {
            let carry = match self.carry {
                Some(reg) => reg,
                None => self.temporary()?,
            };
            self.carry = Some(carry);
            (inst.imm, inst.n) = (i32::from(carry), EXTRA_REGISTER);
        }
        self.emit(inst);
        Ok(())
    }
}

fn space_name(name: &str) -> Option<Space> {
    Some(match name {
        "global" | "const" => Space::Global,
        "shared" | "shared::cta" => Space::Shared,
        "local" => Space::Local,
        "param" | "param::entry" | "param::func" => Space::Param,
        _ => return None,
    })
}
