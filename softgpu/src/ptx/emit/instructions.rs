//! Instructions: a mnemonic and its operands in, code out.

use super::super::alu::{self, Mnemonic};
use super::super::code::*;
use super::super::parse::{Reader, Result};
use super::operands::space_name;
use super::{BLANK, Body, Operand, Symbol};

fn copy(r: Regs, i: &Inst) {
    r.set(i.d, r.get(i.a));
}

pub fn invert(r: Regs, i: &Inst) {
    r.set(i.d, (r.get(i.a) & 1) ^ 1);
}

pub fn add64(r: Regs, i: &Inst) {
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

impl<'a> Body<'_, 'a> {
    pub(super) fn call(&mut self, r: &mut Reader<'a>) -> Result<()> {
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
            // Message, file, line, function, bytes of a character.
            if arguments.len() != 5 || !results.is_empty() {
                return self.fail("call of `__assertfail` does not fit its declaration".to_owned());
            }
            self.f.assertions.push([0, 1, 2, 3].map(|n| arguments[n]));
            self.put(
                Kind::Assert,
                0,
                [0, 0, 0],
                self.f.assertions.len() as i32 - 1,
            );
            return Ok(());
        }
        if name == "cudaGraphSetConditional" {
            let [handle, value] = arguments[..] else {
                return self.fail(format!("call of `{name}` does not fit its declaration"));
            };
            self.f.heap_calls.push([handle, value]);
            let number = self.f.heap_calls.len() as i32 - 1;
            self.put(Kind::Condition, 0, [0, 0, 0], number);
            return Ok(());
        }
        let kind = match name {
            "malloc" => Some((Kind::Malloc, 1)),
            "free" => Some((Kind::Free, 0)),
            _ => None,
        };
        if let Some((kind, given)) = kind {
            if arguments.len() != 1 || results.len() != given {
                return self.fail(format!("call of `{name}` does not fit its declaration"));
            }
            // Where argument and result are in the frame.
            let result = results.first().copied().unwrap_or_default();
            self.f.heap_calls.push([arguments[0], result]);
            self.put(kind, 0, [0, 0, 0], self.f.heap_calls.len() as i32 - 1);
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

    pub(super) fn instruction(
        &mut self,
        m: &Mnemonic<'_>,
        opcode: &str,
        ops: Vec<Operand<'a>>,
    ) -> Result<()> {
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
            "tex" => self.texture(m, opcode, &ops)?,
            "suld" | "sust" => self.surface(m, opcode, &ops)?,
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

    fn texture(&mut self, m: &Mnemonic<'_>, opcode: &str, ops: &[Operand<'a>]) -> Result<()> {
        let (Some(()), true) = (m.only(&["1d", "2d", "v4"]), m.has("v4")) else {
            return self.unknown(opcode);
        };
        let (&[ty, at], [Operand::Vector(data), image]) = (&m.types[..], ops) else {
            return self.unknown(opcode);
        };
        let known = [Ty::F32, Ty::U32, Ty::S32].contains(&ty) && [Ty::F32, Ty::S32].contains(&at);
        if !known || data.len() != 4 {
            return self.unknown(opcode);
        }
        let data = data.iter().map(|one| self.destination(one));
        let data = data.collect::<Result<Vec<_>>>()?;
        self.image(m, opcode, (Access::Fetch, at), image, (ty, data))
    }

    fn surface(&mut self, m: &Mnemonic<'_>, opcode: &str, ops: &[Operand<'a>]) -> Result<()> {
        let choices = [
            ("trap", Outside::Trap),
            ("clamp", Outside::Clamp),
            ("zero", Outside::Zero),
        ];
        let only = m.only(&["b", "1d", "2d", "v2", "v4", "trap", "clamp", "zero"]);
        let outside = m.choose(&choices).unwrap_or(Outside::Trap);
        let (Some(()), true, &[ty], [first, second]) = (only, m.has("b"), &m.types[..], ops) else {
            return self.unknown(opcode);
        };
        let (access, data, image) = match m.base {
            "suld" => (Access::Load(outside), first, second),
            _ => (Access::Store(outside), second, first),
        };
        let data = match data {
            Operand::Vector(parts) => &parts[..],
            one => std::slice::from_ref(one),
        };
        let count = m.choose(&[("v2", 2), ("v4", 4)]).unwrap_or(1);
        if ty == Ty::Pred || data.len() != count || count * ty.bytes() as usize > 16 {
            return self.unknown(opcode);
        }
        let part = |one| match access {
            Access::Store(_) => self.value(one, ty),
            _ => self.destination(one),
        };
        let data = data.iter().map(part).collect::<Result<Vec<_>>>()?;
        self.image(m, opcode, (access, Ty::S32), image, (ty, data))
    }

    fn image(
        &mut self,
        m: &Mnemonic<'_>,
        opcode: &str,
        (access, coordinates): (Access, Ty),
        image: &Operand<'a>,
        (ty, data): (Ty, Vec<u16>),
    ) -> Result<()> {
        let dimensions = m.choose(&[("1d", 1), ("2d", 2)]);
        let Operand::Image(object, given) = image else {
            return self.unknown(opcode);
        };
        if dimensions != Some(given.len()) {
            return self.unknown(opcode);
        }
        let mut at = [self.special(Special::Zero)?; 2];
        for (register, coordinate) in at.iter_mut().zip(given) {
            *register = self.value(coordinate, coordinates)?;
        }
        self.f.images.push(Image {
            access,
            object: *object,
            at,
            at_float: coordinates.is_float(),
            data,
            ty,
        });
        self.put(Kind::Image, 0, [0, 0, 0], self.f.images.len() as i32 - 1);
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
