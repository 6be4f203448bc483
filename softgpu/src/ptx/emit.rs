//! The body of a function: statements in, instructions out.

use std::collections::HashMap;

use super::PtxError;
use super::alu::Mnemonic;
use super::code::*;
use super::lex::Token;
use super::parse::{Module, Reader, Result, declaration, place};

mod instructions;
mod operands;

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
    /// `[object, {coordinates}]`.
    Image(u16, Vec<Operand<'a>>),
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

    fn unknown<T>(&self, opcode: &str) -> Result<T> {
        self.fail(format!("unknown instruction `{opcode}`"))
    }
}
