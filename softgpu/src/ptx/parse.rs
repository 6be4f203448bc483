//! The module level of PTX: directives, variables, signatures of functions.

use std::cell::Cell;
use std::collections::HashMap;

use super::PtxError;
use super::code::{Function, Global, Param, Program, Ty};
use super::emit::{Body, Symbol};
use super::lex::{Token, float, integer, tokens};

pub type Result<T> = std::result::Result<T, PtxError>;

/// The tokens of a module and how far they are read.
pub struct Reader<'a> {
    tokens: Vec<(Token<'a>, u32)>,
    at: usize,
}

impl<'a> Reader<'a> {
    pub fn line(&self) -> u32 {
        self.tokens
            .get(self.at)
            .or(self.tokens.last())
            .map_or(1, |t| t.1)
    }
    pub fn fail<T>(&self, reason: impl Into<String>) -> Result<T> {
        Err(PtxError {
            line: self.line(),
            reason: reason.into(),
        })
    }
    pub fn peek(&self) -> Option<Token<'a>> {
        self.tokens.get(self.at).map(|t| t.0)
    }
    pub fn next(&mut self) -> Result<Token<'a>> {
        match self.peek() {
            Some(token) => {
                self.at += 1;
                Ok(token)
            }
            None => self.fail("the text ends too early"),
        }
    }
    pub fn is(&self, mark: char) -> bool {
        self.peek() == Some(Token::Mark(mark))
    }
    pub fn take(&mut self, mark: char) -> bool {
        let is = self.is(mark);
        self.at += usize::from(is);
        is
    }
    pub fn need(&mut self, mark: char) -> Result<()> {
        if self.take(mark) {
            Ok(())
        } else {
            self.fail(format!("`{mark}` expected, found {}", self.shown()))
        }
    }
    pub fn shown(&self) -> String {
        match self.peek() {
            Some(Token::Word(w)) => format!("`{w}`"),
            Some(Token::Text(t)) => format!("\"{t}\""),
            Some(Token::Mark(m)) => format!("`{m}`"),
            None => "the end".into(),
        }
    }
    pub fn take_word(&mut self, word: &str) -> bool {
        let is = self.peek() == Some(Token::Word(word));
        self.at += usize::from(is);
        is
    }
    /// Takes `name:`.
    pub fn label(&mut self) -> Option<&'a str> {
        match (self.tokens.get(self.at)?.0, self.tokens.get(self.at + 1)?.0) {
            (Token::Word(name), Token::Mark(':')) => {
                self.at += 2;
                Some(name)
            }
            _ => None,
        }
    }
    pub fn word(&mut self) -> Result<&'a str> {
        match self.peek() {
            Some(Token::Word(word)) => {
                self.at += 1;
                Ok(word)
            }
            _ => self.fail(format!("a name expected, found {}", self.shown())),
        }
    }
    pub fn number(&mut self) -> Result<u64> {
        let negative = self.take('-');
        let word = self.word()?;
        match integer(word) {
            Some(v) => Ok(if negative { v.wrapping_neg() } else { v }),
            None => {
                self.at -= 1;
                self.fail(format!("a number expected, found `{word}`"))
            }
        }
    }
    /// Skips to behind the next `mark` outside of braces that open here.
    fn skip_past(&mut self, mark: char) -> Result<()> {
        while self.next()? != Token::Mark(mark) {}
        Ok(())
    }
    fn skip_block(&mut self) -> Result<()> {
        let mut depth = 0;
        loop {
            match self.next()? {
                Token::Mark('{') => depth += 1,
                Token::Mark('}') if depth <= 1 => return Ok(()),
                Token::Mark('}') => depth -= 1,
                _ => {}
            }
        }
    }
}

/// A declared variable, before it has a place.
pub struct Declared<'a> {
    pub name: &'a str,
    pub ty: Ty,
    pub align: u64,
    pub bytes: u64,
    /// `name[]`: its size is known at the launch.
    pub open: bool,
}

/// No single variable of a module is larger: what exceeds it would not fit the device.
const MAX_BYTES: u64 = 1 << 32;

/// What stands between the state space and the initialiser: `.align 8 .b8 name[3][4]`.
pub fn declaration<'a>(r: &mut Reader<'a>) -> Result<Declared<'a>> {
    let (mut align, mut ty, mut lanes) = (0, None, 1);
    loop {
        let word = r.word()?;
        match word {
            ".align" => align = r.number()?,
            ".v2" => lanes = 2,
            ".v4" => lanes = 4,
            ".ptr" | ".global" | ".const" | ".shared" | ".local" | ".generic" => {}
            ".attribute" => return r.fail("`.attribute` variables are not supported"),
            _ => match word.strip_prefix('.') {
                Some(name) => match Ty::parse(name) {
                    Some(parsed) => ty = Some(parsed),
                    None => return r.fail(format!("unknown type `{word}` of a variable")),
                },
                None => {
                    let Some(ty) = ty else {
                        return r.fail(format!("`{word}` has no type"));
                    };
                    let (mut count, mut open) = (lanes, false);
                    while r.take('[') {
                        if r.is(']') {
                            open = true;
                        } else {
                            count = r.number()?.checked_mul(count).unwrap_or(MAX_BYTES);
                        }
                        r.need(']')?;
                    }
                    let bytes = count.saturating_mul(u64::from(ty.bytes()));
                    if bytes >= MAX_BYTES
                        || align > 4096
                        || align & align.wrapping_sub(1) != 0 && align != 0
                    {
                        return r.fail(format!("size or alignment of `{word}` is impossible"));
                    }
                    let natural = u64::from(ty.bytes()) * lanes;
                    return Ok(Declared {
                        name: word,
                        ty,
                        align: align.max(natural),
                        bytes,
                        open,
                    });
                }
            },
        }
    }
}

/// Reserves room for `bytes` at a multiple of `align` behind `end`.
pub fn place(end: &mut u32, bytes: u64, align: u64) -> Option<u32> {
    let at = u64::from(*end).next_multiple_of(align.max(1));
    *end = u32::try_from(at + bytes).ok()?;
    Some(at as u32)
}

/// Names that a whole module knows.
#[derive(Default)]
pub struct Module<'a> {
    pub program: Program,
    pub names: HashMap<&'a str, Symbol>,
    pub functions: HashMap<&'a str, usize>,
    /// Bytes of shared variables declared outside functions; they come first in every block.
    pub shared_bytes: Cell<u32>,
}

/// Reads a whole module.
pub fn parse(text: &str) -> Result<Program> {
    let mut r = Reader {
        tokens: tokens(text)?,
        at: 0,
    };
    let mut module = Module::default();
    if !r.take_word(".version") {
        return r.fail("a PTX module begins with `.version`");
    }
    let version = r.word()?;
    if !version.starts_with(|c: char| c.is_ascii_digit()) {
        return r.fail(format!("`{version}` is no PTX version"));
    }
    while r.peek().is_some() {
        statement(&mut r, &mut module)?;
    }
    for (name, &index) in &module.functions {
        let function = &module.program.functions[index];
        if !function.defined
            && module
                .program
                .functions
                .iter()
                .any(|f| f.calls.iter().any(|c| c.callee == index))
        {
            return r.fail(format!("function `{name}` is called but has no body"));
        }
    }
    Ok(module.program)
}

fn statement<'a>(r: &mut Reader<'a>, module: &mut Module<'a>) -> Result<()> {
    let mut external = false;
    loop {
        let word = r.word()?;
        match word {
            ".visible" | ".weak" | ".common" => {}
            ".extern" => external = true,
            ".target" => {
                let name = r.word()?;
                let digits: String = name.chars().filter(char::is_ascii_digit).collect();
                module.program.target = digits.parse().unwrap_or(0);
                while r.take(',') {
                    r.word()?;
                }
                return Ok(());
            }
            ".address_size" => {
                return if r.number()? == 64 {
                    Ok(())
                } else {
                    r.fail("only 64-bit addresses are supported")
                };
            }
            ".pragma" => return r.skip_past(';'),
            ".section" => {
                r.word()?;
                return r.skip_block();
            }
            ".global" | ".const" => return variable(r, module, external),
            ".shared" => {
                let var = declaration(r)?;
                r.need(';')?;
                let symbol = if var.open {
                    Symbol::DynamicShared
                } else {
                    match place(module.shared_bytes.get_mut(), var.bytes, var.align) {
                        Some(at) => Symbol::Shared(at),
                        None => return r.fail("too much shared memory"),
                    }
                };
                module.names.insert(var.name, symbol);
                return Ok(());
            }
            ".entry" => return function(r, module, true),
            ".func" => return function(r, module, false),
            _ => return r.fail(format!("unknown directive `{word}`")),
        }
    }
}

fn variable<'a>(r: &mut Reader<'a>, module: &mut Module<'a>, external: bool) -> Result<()> {
    let mut var = declaration(r)?;
    if external {
        // Without a definition in this module a use of the name is refused where it stands.
        return r.need(';');
    }
    let mut words = Vec::new();
    if r.take('=') {
        initialiser(r, module, var.ty, &mut words)?;
    }
    let unit = var.ty.bytes() as usize;
    if var.open {
        var.bytes = (words.len() * unit) as u64;
    }
    r.need(';')?;
    if (words.len() * unit) as u64 > var.bytes {
        return r.fail(format!(
            "more initial values than `{}` has room for",
            var.name
        ));
    }
    let data = &mut module.program.data;
    let offset = data.len().next_multiple_of((var.align as usize).max(256));
    data.resize(offset + var.bytes as usize, 0);
    for (n, (word, is_address)) in words.into_iter().enumerate() {
        let at = offset + n * unit;
        data[at..at + unit].copy_from_slice(&word.to_le_bytes()[..unit]);
        if is_address {
            module.program.relocations.push((at as u64, word));
        }
    }
    module.names.insert(var.name, Symbol::Data(offset as u64));
    module.program.globals.insert(
        var.name.into(),
        Global {
            offset: offset as u64,
            bytes: var.bytes,
        },
    );
    Ok(())
}

/// Reads one initial value or a braced list: (bits, whether the data's address is to be added).
fn initialiser<'a>(
    r: &mut Reader<'a>,
    module: &Module<'a>,
    ty: Ty,
    out: &mut Vec<(u64, bool)>,
) -> Result<()> {
    if r.take('{') {
        while !r.take('}') {
            initialiser(r, module, ty, out)?;
            if !r.take(',') && !r.is('}') {
                return r.fail(format!("`,` or `}}` expected, found {}", r.shown()));
            }
        }
        return Ok(());
    }
    let negative = r.take('-');
    let mut word = r.word()?;
    if word == "generic" {
        r.need('(')?;
        word = r.word()?;
        r.need(')')?;
    }
    if word.starts_with(|c: char| c.is_ascii_digit()) {
        let value = match (float(word), integer(word)) {
            (Some(v), _) if ty == Ty::F32 => {
                u64::from((if negative { -v as f32 } else { v as f32 }).to_bits())
            }
            (Some(v), _) => (if negative { -v } else { v }).to_bits(),
            (None, Some(v)) if negative => v.wrapping_neg(),
            (None, Some(v)) => v,
            _ => return r.fail(format!("`{word}` is no value")),
        };
        out.push((value, false));
        return Ok(());
    }
    let Some(Symbol::Data(offset)) = module.names.get(word) else {
        return r.fail(format!(
            "initial value `{word}` is not a variable defined before"
        ));
    };
    if ty.bytes() != 8 {
        return r.fail("an address needs a 64-bit variable");
    }
    let add = if r.take('+') { r.number()? } else { 0 };
    out.push((offset.wrapping_add(add), true));
    Ok(())
}

/// Reads `(.param .u32 a, ...)`: names with their places, packed from `end` on.
fn parameters<'a>(r: &mut Reader<'a>, end: &mut u32) -> Result<Vec<(&'a str, Param)>> {
    let mut out = Vec::new();
    r.need('(')?;
    while !r.take(')') {
        if !r.take_word(".param") {
            return r.fail(format!(
                "parameter in `.param` space expected, found {}",
                r.shown()
            ));
        }
        let var = declaration(r)?;
        match place(end, var.bytes, var.align) {
            Some(offset) if *end <= 32764 => out.push((
                var.name,
                Param {
                    offset,
                    bytes: var.bytes as u32,
                },
            )),
            _ => return r.fail("parameters larger than 32764 bytes"),
        }
        r.take(',');
    }
    Ok(out)
}

fn function<'a>(r: &mut Reader<'a>, module: &mut Module<'a>, is_kernel: bool) -> Result<()> {
    let mut end = 0;
    let results = if r.is('(') {
        parameters(r, &mut end)?
    } else {
        Vec::new()
    };
    let name = r.word()?;
    let params = if r.is('(') {
        parameters(r, &mut end)?
    } else {
        Vec::new()
    };
    let mut f = Function {
        name: name.into(),
        is_kernel,
        params: params.iter().map(|p| p.1).collect(),
        results: results.iter().map(|p| p.1).collect(),
        param_bytes: end,
        frame_bytes: if is_kernel { 0 } else { end },
        max_threads: 1024,
        ..Function::default()
    };
    while let Some(Token::Word(directive)) = r.peek() {
        r.word()?;
        let mut sizes = [1; 3];
        let mut read = |r: &mut Reader<'a>| -> Result<u64> {
            for (n, size) in sizes.iter_mut().enumerate() {
                if n == 0 || r.take(',') {
                    *size = r.number()?.min(1 << 20);
                }
            }
            Ok(sizes.iter().product())
        };
        match directive {
            ".maxntid" => f.max_threads = read(r)?.min(1024) as u32,
            ".reqntid" => {
                f.max_threads = read(r)?.min(1024) as u32;
                f.required_threads = Some(sizes.map(|s| s as u32));
            }
            ".minnctapersm" | ".maxnreg" | ".maxclusterrank" => {
                r.number()?;
            }
            ".noreturn" => {}
            ".pragma" => r.skip_past(';')?,
            _ => {
                return r.fail(format!(
                    "unknown directive `{directive}` of function `{name}`"
                ));
            }
        }
    }
    let index = *module.functions.entry(name).or_insert_with(|| {
        module.program.functions.push(Function::default());
        module.program.functions.len() - 1
    });
    if r.take(';') {
        if !module.program.functions[index].defined {
            module.program.functions[index] = f;
        }
        return Ok(());
    }
    if module.program.functions[index].defined {
        return r.fail(format!("function `{name}` is defined twice"));
    }
    // Calls to itself find the signature.
    module.program.functions[index] = Function {
        name: f.name.clone(),
        params: f.params.clone(),
        results: f.results.clone(),
        ..Function::default()
    };
    f.shared_bytes = module.shared_bytes.get();
    f.defined = true;
    let line = r.line();
    let mut body = Body::new(f, module);
    for (name, param) in params.into_iter().chain(results) {
        body.declare(
            name,
            if is_kernel {
                Symbol::Param(param.offset)
            } else {
                Symbol::Local(param.offset)
            },
        );
    }
    let f = body.read(r)?;
    if !f.check() {
        return Err(PtxError {
            line,
            reason: format!("function `{name}` is inconsistent"),
        });
    }
    module.program.functions[index] = f;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIXTURE: &str = include_str!("../../../tests/fixtures/softgpu.ptx");

    fn reason(body: &str) -> PtxError {
        let text = format!(
            ".version 8.0\n.target sm_90\n.visible .entry k() {{\n.reg .b32 %r<4>; .reg .pred %p;\n{body}\n}}\n"
        );
        parse(&text).err().expect("a refusal")
    }

    #[test]
    fn a_compilers_module_is_read_whole() {
        let program = parse(FIXTURE).expect("a module");
        let names: Vec<&str> = program
            .kernels()
            .map(|k| program.functions[k].name.as_str())
            .collect();
        assert!(
            names.contains(&"vector_add") && names.contains(&"mathematics"),
            "{names:?}"
        );
        let kernel = &program.functions[program.kernel("mathematics").expect("a kernel")];
        // A float, a double behind a gap, five integers, a gap; then a pointer.
        assert_eq!(
            kernel.params,
            [
                Param {
                    offset: 0,
                    bytes: 40
                },
                Param {
                    offset: 40,
                    bytes: 8
                }
            ]
        );
        assert_eq!(program.globals["table"].bytes, 24);
        let table = program.globals["table"].offset as usize;
        assert_eq!(program.data[table..table + 8], 1.5f64.to_le_bytes());
        let pointer = program.globals["pointer"].offset;
        assert_eq!(
            program.relocations,
            [(pointer, program.globals["counter"].offset)]
        );
    }

    #[test]
    fn refusals_name_what_and_where() {
        for (body, line, part) in [
            ("\nfrob.u32 %r1, %r2;", 6, "frob.u32"),
            ("add.frob.u32 %r1, %r2, %r3;", 5, "add.frob.u32"),
            ("add.u32 %r1, %r2;", 5, "2 operands"),
            ("add.u32 %r1, %r2, %r4;", 5, "%r4"),
            ("bra nowhere;", 5, "nowhere"),
            ("call f;", 5, "`f`"),
            ("mov.u32 %r1, %frob.x;", 5, "%frob.x"),
            ("ld.frob.u32 %r1, [%r2];", 5, "ld.frob.u32"),
            ("wgmma.fence.sync.aligned;", 5, "wgmma.fence.sync.aligned"),
            (
                "tex.2d.v4.f32.f32 {%r1, %r1, %r1, %r1}, [%r1];",
                5,
                "tex.2d.v4.f32.f32",
            ),
            (
                "tex.1d.v4.f32.s32 {%r1, %r1, %r1, %r1}, [%r1, {%r1, %r2}];",
                5,
                "tex.1d.v4.f32.s32",
            ),
            ("suld.b.3d.b32.trap {%r1}, [%r1, {%r1}];", 5, "suld.b.3d"),
            ("sust.b.1d.b32.trap [%r1, %r2], {%r1};", 5, "in braces"),
        ] {
            let error = reason(body);
            assert!(
                error.line == line && error.reason.contains(part),
                "{body}: {error}"
            );
        }
    }

    #[test]
    fn damaged_text_is_refused_and_never_worse() {
        let mut seed = 1u64;
        let mut random = |below: usize| {
            seed = seed
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (seed >> 33) as usize % below
        };
        for _ in 0..150 {
            let cut = random(FIXTURE.len());
            let text = &FIXTURE[..cut];
            // Cut inside a function it cannot be whole.
            if text
                .rfind("\n{")
                .is_some_and(|open| !text[open..].contains("\n}"))
            {
                assert!(parse(text).is_err(), "cut at {cut}");
            }
            let mut bytes = FIXTURE.as_bytes().to_vec();
            for _ in 0..1 + random(20) {
                let (at, from) = (random(bytes.len()), random(bytes.len()));
                bytes[at] = if random(2) == 0 {
                    bytes[from]
                } else {
                    random(128) as u8
                };
            }
            if let Ok(program) = parse(std::str::from_utf8(&bytes).expect("ASCII")) {
                assert!(
                    program
                        .functions
                        .iter()
                        .filter(|f| f.defined)
                        .all(Function::check)
                );
            }
        }
    }
}
