//! The body of a function: statements in, instructions out.

use std::collections::HashMap;

use super::PtxError;
use super::alu::{self, Mnemonic};
use super::code::*;
use super::lex::{Token, float, integer};
use super::parse::{Module, Reader, Result, declaration, place};

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

#[derive(Default)]
struct Scope<'a> {
    names: HashMap<&'a str, Symbol>,
    /// `%r<9>`: prefix, first register, count.
    ranges: Vec<(&'a str, u16, u16)>,
    labels: HashMap<&'a str, u32>,
    /// Branches: where they stand, to which label, on which line.
    fixes: Vec<(usize, &'a str, u32)>,
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

const BLANK: Inst = Inst {
    alu: nothing,
    kind: Kind::Alu,
    n: 0,
    slot: 0,
    d: 0,
    a: 0,
    b: 0,
    c: 0,
    imm: 0,
};

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

/// `n` bits of `a` from bit `imm` on.
fn unpack(r: Regs, i: &Inst) {
    r.set(i.d, r.get(i.a) >> i.imm & (u64::MAX >> (64 - i.n)));
}

/// `b` with `n` bits of `a` put in at bit `imm`.
fn pack(r: Regs, i: &Inst) {
    r.set(
        i.d,
        r.get(i.b) | (r.get(i.a) & (u64::MAX >> (64 - i.n))) << i.imm,
    );
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
        Err(PtxError {
            line: self.line,
            reason: reason.into(),
        })
    }

    fn registers(&mut self, count: u64) -> Result<u16> {
        let first = self.f.registers;
        if count > u64::from(u16::MAX) || first + count as usize > usize::from(u16::MAX) {
            return self.fail(format!(
                "function `{}` has more than 65535 registers",
                self.f.name
            ));
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

    fn put(&mut self, kind: Kind, n: u8, [d, a, b]: [u16; 3], imm: i32) -> usize {
        self.emit(Inst {
            kind,
            n,
            d,
            a,
            b,
            imm,
            ..BLANK
        })
    }

    fn alu_with(&mut self, alu: Alu, n: u8, [d, a, b]: [u16; 3], imm: i32) {
        self.emit(Inst {
            alu,
            n,
            d,
            a,
            b,
            imm,
            ..BLANK
        });
    }

    fn alu(&mut self, alu: Alu, d: u16, a: u16, b: u16) {
        self.alu_with(alu, 0, [d, a, b], 0);
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
            let kind = if self.f.is_kernel {
                Kind::Exit
            } else {
                Kind::Ret
            };
            self.put(kind, 0, [0, 0, 0], 0);
        }
        let Some(scope) = self.scopes.pop() else {
            return self.fail("`}` without `{`");
        };
        for (fix, label, line) in scope.fixes {
            match (scope.labels.get(label), self.scopes.last_mut()) {
                (Some(&target), _) => self.f.code[fix].imm = target as i32,
                (None, Some(outer)) => outer.fixes.push((fix, label, line)),
                (None, None) => {
                    return Err(PtxError {
                        line,
                        reason: format!("no label `{label}`"),
                    });
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
                if let Some(number) = name
                    .strip_prefix(prefix)
                    .and_then(|n| n.parse::<u16>().ok())
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
            self.put(kind, 0, [0, reg, 0], 0)
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
        let at = self.put(kind, 0, [0, predicate, 0], 0);
        let line = self.line;
        if let Some(scope) = self.scopes.last_mut() {
            scope.fixes.push((at, label, line));
        }
    }

    /// Takes `name:`, if that comes next.
    fn is_label(&mut self, r: &mut Reader<'a>) -> Result<bool> {
        let Some(name) = r.label() else {
            return Ok(false);
        };
        let at = self.f.code.len() as u32;
        let scope = self.scopes.last_mut();
        if scope.is_some_and(|s| s.labels.insert(name, at).is_some()) {
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
                    let end = if shared {
                        &mut self.f.shared_bytes
                    } else {
                        &mut self.f.frame_bytes
                    };
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
                return Ok(if negative {
                    Operand::Float(-v, None)
                } else {
                    Operand::Float(v, bits)
                });
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
        let Some(special) = word.strip_prefix('%') else {
            return Ok(None);
        };
        let axis = |c: &str| match c {
            "x" => Some(0),
            "y" => Some(1),
            "z" => Some(2),
            _ => None,
        };
        let special = match special.split_once('.') {
            Some((base, c)) => axis(c).and_then(|n| match base {
                "tid" => Some(Special::Tid(n)),
                "ntid" => Some(Special::Ntid(n)),
                "ctaid" => Some(Special::Ctaid(n)),
                "nctaid" => Some(Special::Nctaid(n)),
                _ => None,
            }),
            None => match special {
                "laneid" => Some(Special::LaneId),
                "warpid" => Some(Special::WarpId),
                "smid" => Some(Special::Zero),
                "lanemask_eq" => Some(Special::LaneBit),
                "lanemask_lt" => Some(Special::LanesBelow),
                "dynamic_smem_size" => Some(Special::DynamicSharedSize),
                "clock" | "clock64" | "globaltimer" => {
                    let (n, d) = (u8::from(special == "globaltimer"), self.temporary()?);
                    self.put(Kind::Clock, n, [d, 0, 0], 0);
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
            Operand::Memory(..) | Operand::Vector(_) => {
                self.fail("a register or a number expected")
            }
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
        let Operand::Memory(base, offset) = *operand else {
            return self.fail("an address in brackets expected");
        };
        let (reg, add, symbol) = match base {
            Base::Reg(reg) => (reg, offset, None),
            Base::None => (self.special(Special::Zero)?, offset, None),
            Base::Symbol(symbol) => match symbol {
                Symbol::Local(at) => (
                    self.special(Special::FrameBase)?,
                    i64::from(at) + offset,
                    Some(symbol),
                ),
                Symbol::Param(at) | Symbol::Shared(at) => (
                    self.special(Special::Zero)?,
                    i64::from(at) + offset,
                    Some(symbol),
                ),
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
        let results = if r.is('(') {
            list(self, r)?
        } else {
            Vec::new()
        };
        r.take(',');
        let name = r.word()?;
        let arguments = if r.take(',') {
            list(self, r)?
        } else {
            Vec::new()
        };
        if name == "__assertfail" {
            self.put(Kind::Trap, 0, [0, 0, 0], 710);
            return Ok(());
        }
        let Some(&callee) = self.module.functions.get(name) else {
            return self.fail(format!(
                "call of `{name}`, which is no function of this module"
            ));
        };
        let f = &self.module.program.functions[callee];
        if f.is_kernel || f.params.len() != arguments.len() || f.results.len() != results.len() {
            return self.fail(format!("call of `{name}` does not fit its declaration"));
        }
        let arguments = arguments
            .iter()
            .zip(&f.params)
            .map(|(&at, p)| (at, p.offset, p.bytes))
            .collect();
        let results = results
            .iter()
            .zip(&f.results)
            .map(|(&at, p)| (at, p.offset, p.bytes))
            .collect();
        self.f.calls.push(CallSite {
            callee,
            arguments,
            results,
        });
        self.put(Kind::Call, 0, [0, 0, 0], self.f.calls.len() as i32 - 1);
        Ok(())
    }

    fn instruction(&mut self, m: &Mnemonic<'_>, opcode: &str, ops: Vec<Operand<'a>>) -> Result<()> {
        let count = |n: std::ops::RangeInclusive<usize>| {
            if n.contains(&ops.len()) {
                Ok(())
            } else {
                self.fail(format!("`{opcode}` with {} operands", ops.len()))
            }
        };
        match m.base {
            "ret" => {
                let kind = if self.f.is_kernel {
                    Kind::Exit
                } else {
                    Kind::Ret
                };
                self.put(kind, 0, [0, 0, 0], 0);
            }
            "exit" => {
                self.put(Kind::Exit, 0, [0, 0, 0], 0);
            }
            "trap" | "brkpt" => {
                self.put(Kind::Trap, 0, [0, 0, 0], 719);
            }
            "membar" | "fence" => {
                self.put(Kind::Fence, 0, [0, 0, 0], 0);
            }
            "nanosleep" => {
                count(1..=1)?;
                let a = self.value(&ops[0], Ty::U32)?;
                self.put(Kind::Sleep, 0, [0, a, 0], 0);
            }
            // Hints without effect on results.
            "prefetch" | "prefetchu" | "applypriority" | "griddepcontrol" | "pmevent" => {}
            "mov" => {
                count(2..=2)?;
                self.mov(m, opcode, &ops)?;
            }
            "ld" | "st" => {
                count(2..=2)?;
                self.access(m, opcode, &ops)?;
            }
            "cvta" => {
                count(2..=2)?;
                let d = self.destination(&ops[0])?;
                let a = self.value(&ops[1], Ty::U64)?;
                let Some(space) = m.mods.iter().find_map(|m| space_name(m)) else {
                    return self.unknown(opcode);
                };
                match self.window(space)? {
                    Some(base) => self.alu(if m.has("to") { sub64 } else { add64 }, d, a, base),
                    None => self.alu(copy, d, a, 0),
                }
            }
            "cvt" => self.cvt(m, opcode, &ops)?,
            "setp" => {
                self.setp(m, opcode, &ops)?;
            }
            "bar" | "barrier" => self.barrier(m, opcode, &ops)?,
            "shfl" | "vote" => self.warp(m, opcode, &ops)?,
            "activemask" => {
                count(1..=1)?;
                // A lane is sure of itself only: threads run one after the other.
                let d = self.destination(&ops[0])?;
                let a = self.special(Special::LaneBit)?;
                self.alu(copy, d, a, 0);
            }
            "atom" | "red" => self.atom(m, opcode, &ops)?,
            _ => self.arithmetic(m, opcode, &ops)?,
        }
        Ok(())
    }

    /// The base register of a space that is a window of the generic one.
    fn window(&mut self, space: Space) -> Result<Option<u16>> {
        match space {
            Space::Global => Ok(None),
            Space::Shared => self.special(Special::SharedBase).map(Some),
            Space::Local => self.special(Special::LocalBase).map(Some),
            Space::Param => self.fail("generic addresses of parameters are not supported"),
        }
    }

    fn mov(&mut self, m: &Mnemonic<'_>, opcode: &str, ops: &[Operand<'a>]) -> Result<()> {
        let (Some(ty), true) = (m.ty(), m.mods.is_empty()) else {
            return self.unknown(opcode);
        };
        let (Operand::Vector(parts), vector_first) = (match (&ops[0], &ops[1]) {
            (vector @ Operand::Vector(_), _) => (vector, true),
            (_, other) => (other, false),
        }) else {
            let (d, a) = (self.destination(&ops[0])?, self.value(&ops[1], ty)?);
            self.alu(copy, d, a, 0);
            return Ok(());
        };
        let bits = ty.bytes() * 8 / parts.len().max(1) as u32;
        if !bits.is_power_of_two() || bits < 8 {
            return self.unknown(opcode);
        }
        let places = (0..).step_by(bits as usize);
        if vector_first {
            let a = self.value(&ops[1], ty)?;
            for (part, at) in parts.iter().zip(places) {
                let d = self.destination(part)?;
                self.alu_with(unpack, bits as u8, [d, a, 0], at);
            }
            return Ok(());
        }
        let mut sum = self.special(Special::Zero)?;
        for (part, at) in parts.iter().zip(places) {
            let (a, t) = (self.value(part, ty)?, self.temporary()?);
            self.alu_with(pack, bits as u8, [t, a, sum], at);
            sum = t;
        }
        let d = self.destination(&ops[0])?;
        self.alu(copy, d, sum, 0);
        Ok(())
    }

    fn check_access(&self, m: &Mnemonic<'_>, opcode: &str) -> Result<Ty> {
        const KNOWN: &str =
            " volatile relaxed acquire release weak sys gpu cta ca cg cs lu cv wb wt nc v2 v4 ";
        for name in &m.mods {
            let hint = name.starts_with("L1::") || name.starts_with("L2::");
            if !hint && !KNOWN.contains(&format!(" {name} ")) && space_name(name).is_none() {
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

    /// Loads and stores, one instruction for each part of a vector.
    fn access(&mut self, m: &Mnemonic<'_>, opcode: &str, ops: &[Operand<'a>]) -> Result<()> {
        let (ty, is_load) = (self.check_access(m, opcode)?, m.base == "ld");
        let (address, data) = if is_load {
            (&ops[1], &ops[0])
        } else {
            (&ops[0], &ops[1])
        };
        let (mut reg, add, symbol) = self.memory(address)?;
        let kind = match (self.space(m, symbol), is_load) {
            (Space::Global, true) => Kind::LdGlobal,
            (Space::Global, false) => Kind::StGlobal,
            (Space::Shared, true) => Kind::LdShared,
            (Space::Shared, false) => Kind::StShared,
            (Space::Local, true) => Kind::LdLocal,
            (Space::Local, false) => Kind::StLocal,
            (Space::Param, true) => Kind::LdParam,
            (Space::Param, false) => return self.fail("a kernel's parameters cannot be written"),
        };
        let parts = match data {
            Operand::Vector(parts) => &parts[..],
            one => std::slice::from_ref(one),
        };
        let part = |one| {
            if is_load {
                self.destination(one)
            } else {
                self.value(one, ty)
            }
        };
        let parts = parts.iter().map(part).collect::<Result<Vec<_>>>()?;
        if is_load && parts.len() > 1 && parts.contains(&reg) {
            let t = self.temporary()?;
            self.alu(copy, t, reg, 0);
            reg = t;
        }
        if parts.len() > 1 {
            // A vector must be aligned as a whole.
            let n = (parts.len() as u32 * ty.bytes()) as u8;
            self.put(Kind::Align, n, [0, reg, 0], add);
        }
        for (n, part) in parts.into_iter().enumerate() {
            let (d, b) = if is_load { (part, 0) } else { (0, part) };
            let imm = add.wrapping_add((n as u32 * ty.bytes()) as i32);
            let slot = self.slot();
            self.emit(Inst {
                kind,
                n: ty as u8,
                slot,
                d,
                a: reg,
                b,
                imm,
                ..BLANK
            });
        }
        Ok(())
    }

    fn cvt(&mut self, m: &Mnemonic<'_>, opcode: &str, ops: &[Operand<'a>]) -> Result<()> {
        let Some((steps, imm)) = alu::convert(m) else {
            return self.unknown(opcode);
        };
        if ops.len() != 2 {
            return self.unknown(opcode);
        }
        let d = self.destination(&ops[0])?;
        let mut a = self.value(&ops[1], m.types[1])?;
        for alu in steps {
            self.alu_with(alu, 0, [d, a, 0], imm);
            a = d;
        }
        Ok(())
    }

    fn setp(&mut self, m: &Mnemonic<'_>, opcode: &str, ops: &[Operand<'a>]) -> Result<()> {
        let logic = m.mods.iter().find_map(|name| alu::logic(name));
        let known = m
            .mods
            .iter()
            .skip(1)
            .all(|m| *m == "ftz" || alu::logic(m).is_some());
        let (Some(ty), true, 1) = (m.ty(), known, m.types.len()) else {
            return self.unknown(opcode);
        };
        let Some((compare, imm)) = alu::compare(m, ty) else {
            return self.unknown(opcode);
        };
        if ops.len() != 3 + usize::from(logic.is_some()) {
            return self.fail(format!("`{opcode}` with {} operands", ops.len()));
        }
        let p = self.destination(&ops[0])?;
        let (a, b) = (self.value(&ops[1], ty)?, self.value(&ops[2], ty)?);
        let Some(logic) = logic else {
            self.alu_with(compare, 0, [p, a, b], imm);
            return Ok(());
        };
        let (c, t) = (self.value(&ops[3], Ty::Pred)?, self.temporary()?);
        self.alu_with(compare, 0, [t, a, b], imm);
        self.alu(logic, p, t, c);
        Ok(())
    }

    fn barrier(&mut self, m: &Mnemonic<'_>, opcode: &str, ops: &[Operand<'a>]) -> Result<()> {
        let votes = [("popc", Vote::Count), ("and", Vote::All), ("or", Vote::Any)];
        let known = m.only(&["sync", "red", "warp", "cta", "aligned", "popc", "and", "or"]);
        let (warp, sync, red) = (m.has("warp"), m.has("sync"), m.has("red"));
        if known.is_none() || !(sync || red && ops.len() >= 3) || ops.is_empty() {
            return self.unknown(opcode);
        }
        if warp {
            let mask = self.value(&ops[0], Ty::U32)?;
            return self.meet(Meeting::Warp { mask });
        }
        // [result,] id [, count] [, predicate]
        let (mut d, mut p, mut rest) = (0, 0, ops);
        if red {
            d = self.destination(&ops[0])?;
            p = self.value(&ops[ops.len() - 1], Ty::Pred)?;
            rest = &ops[1..ops.len() - 1];
        }
        let vote = m.choose(&votes).unwrap_or(Vote::Count);
        let id = self.value(&rest[0], Ty::U32)?;
        let count = match rest.get(1) {
            Some(count) => self.value(count, Ty::U32)?,
            None => self.special(Special::Zero)?,
        };
        self.meet(Meeting::Barrier {
            id,
            count,
            vote,
            d,
            p,
        })
    }

    fn meet(&mut self, meeting: Meeting) -> Result<()> {
        self.f.meetings.push(meeting);
        self.put(Kind::Meet, 0, [0, 0, 0], self.f.meetings.len() as i32 - 1);
        Ok(())
    }

    fn warp(&mut self, m: &Mnemonic<'_>, opcode: &str, ops: &[Operand<'a>]) -> Result<()> {
        let modes = [
            ("up", Shuffle::Up),
            ("down", Shuffle::Down),
            ("bfly", Shuffle::Butterfly),
            ("idx", Shuffle::Index),
        ];
        let votes = [
            ("ballot", Vote::Ballot),
            ("all", Vote::All),
            ("any", Vote::Any),
            ("uni", Vote::Uniform),
        ];
        if !m.has("sync") || ops.len() < 3 {
            return self.unknown(opcode);
        }
        let d = self.destination(&ops[0])?;
        let mask = self.value(&ops[ops.len() - 1], Ty::U32)?;
        match (m.base, ops.len(), m.choose(&modes), m.choose(&votes)) {
            ("shfl", 5 | 6, Some(mode), _) => {
                let p = if ops.len() == 6 {
                    self.destination(&ops[1])?
                } else {
                    0
                };
                let [a, b, c] = [4, 3, 2].map(|back| self.value(&ops[ops.len() - back], Ty::U32));
                self.meet(Meeting::Shuffle {
                    mode,
                    d,
                    p,
                    a: a?,
                    b: b?,
                    c: c?,
                    mask,
                })
            }
            ("vote", 3, _, Some(vote)) => {
                let p = self.value(&ops[1], Ty::Pred)?;
                self.meet(Meeting::Vote { vote, d, p, mask })
            }
            _ => self.unknown(opcode),
        }
    }

    fn atom(&mut self, m: &Mnemonic<'_>, opcode: &str, ops: &[Operand<'a>]) -> Result<()> {
        use AtomOp::{Add, And, Cas, Dec, Exch, Inc, Max, Min, Or, Xor};
        #[rustfmt::skip]
        let known = [
            ("add", Add), ("min", Min), ("max", Max), ("exch", Exch), ("cas", Cas),
            ("and", And), ("or", Or), ("xor", Xor), ("inc", Inc), ("dec", Dec),
        ];
        let order = [
            "relaxed", "acquire", "release", "acq_rel", "cta", "gpu", "sys",
        ];
        let is_known = |m: &&str| {
            let is_op = known.iter().any(|(name, _)| name == m);
            is_op || order.contains(m) || space_name(m).is_some()
        };
        let (Some(op), Some(ty), true) = (m.choose(&known), m.ty(), m.mods.iter().all(is_known))
        else {
            return self.unknown(opcode);
        };
        let (gives, inputs) = (usize::from(m.base == "atom"), if op == Cas { 2 } else { 1 });
        if ty.bytes() < 4
            || ty.is_float() && op != Add && op != Exch
            || ops.len() != gives + 1 + inputs
        {
            return self.unknown(opcode);
        }
        let d = if gives == 1 {
            self.destination(&ops[0])?
        } else {
            0
        };
        let (address, offset, symbol) = self.memory(&ops[gives])?;
        let space = self.space(m, symbol);
        let b = self.value(&ops[gives + 1], ty)?;
        let c = if inputs == 2 {
            self.value(&ops[gives + 2], ty)?
        } else {
            0
        };
        let kind = match space {
            Space::Global => Kind::AtomGlobal,
            Space::Shared => Kind::AtomShared,
            Space::Local | Space::Param => return self.unknown(opcode),
        };
        let (slot, n) = (self.slot(), ty as u8 | (op as u8) << 4);
        self.emit(Inst {
            kind,
            n,
            slot,
            d,
            a: address,
            b,
            c,
            imm: offset,
            ..BLANK
        });
        Ok(())
    }

    fn arithmetic(&mut self, m: &Mnemonic<'_>, opcode: &str, ops: &[Operand<'a>]) -> Result<()> {
        let (Some((alu, sources, imm)), Some(ty)) = (alu::select(m), m.ty()) else {
            return self.unknown(opcode);
        };
        let lut = usize::from(m.base == "lop3");
        if ops.len() != 1 + sources + lut {
            return self.fail(format!("`{opcode}` with {} operands", ops.len()));
        }
        let d = self.destination(&ops[0])?;
        let mut inst = Inst {
            alu,
            d,
            imm,
            ..BLANK
        };
        for (n, op) in ops[1..=sources].iter().enumerate() {
            let reg = self.value(
                op,
                if (m.base, n) == ("selp", 2) {
                    Ty::Pred
                } else {
                    ty
                },
            )?;
            match n {
                0 => inst.a = reg,
                1 => inst.b = reg,
                2 => inst.c = reg,
                _ => (inst.imm, inst.kind) = (i32::from(reg), Kind::Alu4),
            }
        }
        if lut == 1 {
            let Operand::Int(table) = ops[4] else {
                return self.fail("`lop3` needs a number as its table");
            };
            inst.imm = table as i32 & 0xFF;
        }
        inst.n = alu::uses_carry(m);
        if inst.n != 0 {
            let carry = match self.carry {
                Some(reg) => reg,
                None => self.temporary()?,
            };
            self.carry = Some(carry);
            (inst.imm, inst.kind) = (i32::from(carry), Kind::Alu4);
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
