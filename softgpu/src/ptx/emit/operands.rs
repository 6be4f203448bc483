//! Operands: their text, and the register or address that it denotes.

use super::super::alu::Mnemonic;
use super::super::code::*;
use super::super::lex::{Token, float, integer};
use super::super::parse::{Reader, Result};
use super::instructions::{add64, invert};
use super::{Base, Body, Operand, Symbol};

impl<'a> Body<'_, 'a> {
    pub(super) fn operand(&mut self, r: &mut Reader<'a>) -> Result<Operand<'a>> {
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
            if let Base::Reg(object) = base
                && r.take(',')
            {
                if r.is('{')
                    && let Operand::Vector(at) = self.operand(r)?
                {
                    r.need(']')?;
                    return Ok(Operand::Image(object, at));
                }
                return self.fail("coordinates in braces expected");
            }
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
                "smid" => Some(Special::SmId),
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
    pub(super) fn value(&mut self, operand: &Operand<'a>, ty: Ty) -> Result<u16> {
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
            Operand::Memory(..) | Operand::Vector(_) | Operand::Image(..) => {
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

    pub(super) fn destination(&mut self, operand: &Operand<'a>) -> Result<u16> {
        match *operand {
            Operand::Reg(reg) => Ok(reg),
            _ => self.fail("a register expected as destination"),
        }
    }

    /// An address as (register, what to add to it).
    pub(super) fn memory(&mut self, operand: &Operand<'a>) -> Result<(u16, i32, Option<Symbol>)> {
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

    pub(super) fn space(&self, m: &Mnemonic<'_>, symbol: Option<Symbol>) -> Space {
        match (symbol, m.mods.iter().find_map(|m| space_name(m))) {
            (Some(Symbol::Local(_)), _) => Space::Local,
            (_, Some(Space::Param)) if !self.f.is_kernel => Space::Local,
            (Some(Symbol::Param(_)), _) => Space::Param,
            (Some(Symbol::Shared(_) | Symbol::DynamicShared), _) => Space::Shared,
            (_, Some(space)) => space,
            (_, None) => Space::Global,
        }
    }
}

pub fn space_name(name: &str) -> Option<Space> {
    Some(match name {
        "global" | "const" => Space::Global,
        "shared" | "shared::cta" => Space::Shared,
        "local" => Space::Local,
        "param" | "param::entry" | "param::func" => Space::Param,
        _ => return None,
    })
}
