//! Images with `__managed__` variables.
//!
//! The driver would allocate managed memory for such variables, which only the server's process could use. So the server
//! loads an image whose kernels use other memory instead: a block of pinned memory of the client's, which has the same
//! address for the client, the server and the devices. In a cubin, the addresses are in the relocations of its constant
//! banks, or of instructions in code for debuggers and separate compilation (as nvcc 13.0 makes them for compute capability
//! 7.5 to 10.0); in a text, each instruction that names a variable gets its address in a register.

use crate::engine::gpu::cubin::{Budget, ELF, EM_CUDA, KIND_TEXT, entries};
use object::read::elf::{ElfFile64, ElfSymbol64, FileHeader, SectionHeader, Sym};
use object::{Endianness, Object, ObjectSection, ObjectSymbol, SymbolKind};
use std::collections::{HashMap, HashSet};

/// Bit of `st_other` of a managed variable's symbol.
const MANAGED: u8 = 4;
/// Types of relocations by a symbol: its 64-bit address; the lower and the upper half, in bits 32 to 63 of an instruction
/// (`R_CUDA_64`, `R_CUDA_ABS32_LO_32`, `R_CUDA_ABS32_HI_32`).
const ADDRESS: u32 = 2;
const LOWER: u32 = 56;
const UPPER: u32 = 57;
/// Alignment of variables, bytes.
const ALIGN: u64 = 256;
/// Most managed variables of an image.
const MOST: usize = 1 << 12;
/// Most bytes of the managed variables of an image.
const MOST_BYTES: u64 = 1 << 36;
/// Most bytes of initial values.
const MOST_INITIAL: usize = 1 << 28;
/// Longest text, bytes: its tokens take some fifty times as much memory.
const LONGEST_TEXT: usize = 4 << 20;

/// A managed variable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Variable {
    /// Its name in the code.
    pub name: String,
    /// Position in the block, bytes.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Its first bytes; the others are zeros.
    initial: Vec<u8>,
}

/// The code of an image that a device runs, and its managed variables.
#[derive(Debug)]
pub struct ManagedImage {
    code: Code,
    /// The variables, by position.
    pub variables: Vec<Variable>,
}

#[derive(Debug)]
enum Code {
    Cubin(Vec<u8>),
    Text(String),
}

/// Whether a symbol of a cubin is a managed variable.
pub fn is_managed(symbol: &ElfSymbol64<'_, '_>) -> bool {
    symbol.elf_symbol().st_other() & MANAGED != 0 && symbol.kind() == SymbolKind::Data
}

/// The attribute of a managed variable in a text.
pub const ATTRIBUTE: &[u8] = b".attribute(.managed)";

impl ManagedImage {
    /// The code of an image for devices of this compute capability (`10 * major + minor`); `None` if its variables
    /// cannot be placed elsewhere.
    pub fn of(image: &[u8], arch: u32) -> Option<ManagedImage> {
        let code = Code::of(image, arch)?;
        let mut variables = match &code {
            Code::Cubin(bytes) => variables_of_cubin(bytes)?,
            Code::Text(text) => variables_of_text(text)?,
        };
        let initial = variables.iter().map(|one| one.initial.len()).sum::<usize>();
        if variables.len() > MOST || initial > MOST_INITIAL {
            return None;
        }
        let mut offset = 0u64;
        for one in &mut variables {
            one.offset = offset;
            let len = one.len.max(1).checked_next_multiple_of(ALIGN)?;
            offset = offset.checked_add(len).filter(|len| *len <= MOST_BYTES)?;
        }
        let made = ManagedImage { code, variables };
        // Whatever cannot be converted is found now.
        made.at(0).map(|_| made)
    }

    /// Bytes of the block.
    pub fn len(&self) -> u64 {
        self.variables
            .last()
            .map_or(0, |one| one.offset + one.len.max(1).next_multiple_of(ALIGN))
    }

    /// Initial bytes of the variables, with their positions in the block; the others are zeros.
    pub fn initial(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.variables
            .iter()
            .map(|one| (one.offset, &one.initial[..]))
    }

    /// The code with the variables in a block at this address.
    pub fn at(&self, base: u64) -> Option<Vec<u8>> {
        let places = self.variables.iter();
        let places = places.map(|one| (one.name.as_str(), base.wrapping_add(one.offset)));
        let places: HashMap<&str, u64> = places.collect();
        match &self.code {
            Code::Cubin(bytes) => cubin_at(bytes, &places),
            Code::Text(text) => text_at(text, &places).map(String::into_bytes),
        }
    }
}

impl Code {
    fn of(image: &[u8], arch: u32) -> Option<Code> {
        let text = |bytes: &[u8]| {
            let text = bytes.split(|byte| *byte == 0).next()?;
            (text.len() <= LONGEST_TEXT).then_some(())?;
            String::from_utf8(text.to_vec()).ok().map(Code::Text)
        };
        if image.starts_with(ELF) {
            return Some(Code::Cubin(image.to_vec()));
        }
        let entries = entries(image)?;
        if entries.is_empty() {
            return text(image);
        }
        let mut budget = Budget::of_code(image);
        let best = entries.iter().filter(|one| one.fits(arch));
        if let Some(best) = best.max_by_key(|one| one.arch) {
            let mut same = entries.iter().filter(|one| one.fits(arch));
            let only = same.by_ref().filter(|one| one.arch == best.arch).count() == 1;
            let code = best.content(&mut budget).filter(|_| only)?;
            return Some(Code::Cubin(code.into_owned()));
        }
        let texts = entries.iter().filter(|one| one.kind == KIND_TEXT);
        let best = texts.filter(|one| one.arch <= arch);
        text(&best.max_by_key(|one| one.arch)?.content(&mut budget)?)
    }
}

fn variables_of_cubin(bytes: &[u8]) -> Option<Vec<Variable>> {
    let file = ElfFile64::<Endianness>::parse(bytes).ok()?;
    if file.elf_header().e_machine(file.endian()) != EM_CUDA {
        return None;
    }
    let mut found = Vec::new();
    // Names and contents of symbols may overlap.
    let mut budget = Budget::of_names(bytes);
    for symbol in file.symbols() {
        if !is_managed(&symbol) {
            continue;
        }
        let section = file.section_by_index(symbol.section_index()?).ok()?;
        let data = section.data().ok()?;
        let initial = match data.is_empty() {
            true => Vec::new(),
            false => {
                let start = usize::try_from(symbol.address()).ok()?;
                let end = start.checked_add(symbol.size().try_into().ok()?)?;
                budget.spend(symbol.size())?;
                data.get(start..end)?.to_vec()
            }
        };
        let name = symbol.name().ok()?;
        budget.spend(name.len() as u64)?;
        found.push(Variable {
            name: name.to_owned(),
            offset: 0,
            len: symbol.size(),
            initial,
        });
        if found.len() > MOST {
            return None;
        }
    }
    Some(found)
}

fn put<const N: usize>(bytes: &mut [u8], at: u64, value: [u8; N]) -> Option<()> {
    let at = usize::try_from(at).ok()?;
    let place = bytes.get_mut(at..at.checked_add(N)?)?;
    place.copy_from_slice(&value);
    Some(())
}

/// Writes the addresses into the sections that refer to the variables, and removes these relocations.
fn cubin_at(bytes: &[u8], places: &HashMap<&str, u64>) -> Option<Vec<u8>> {
    /// Of a section's header, bytes: where its size is.
    const SIZE_AT: u64 = 32;
    /// Of a symbol, bytes: its size, and where its bits are.
    const SYMBOL: u64 = 24;
    const OTHER_AT: u64 = 5;
    let mut made = bytes.to_vec();
    let file = ElfFile64::<Endianness>::parse(bytes).ok()?;
    let (header, endian) = (file.elf_header(), file.endian());
    let managed = file.symbols().filter(is_managed);
    let place_of: HashMap<u64, u64> = managed
        .filter_map(|one| Some((one.index().0 as u64, *places.get(one.name().ok()?)?)))
        .collect();
    // Sections may overlap.
    let mut budget = Budget::of_names(bytes);
    let headers = header.section_headers(endian, bytes).ok()?;
    for (at, section) in headers.iter().enumerate() {
        let kind = section.sh_type(endian);
        let with_addend = match kind {
            object::elf::SHT_RELA => true,
            object::elf::SHT_REL => false,
            object::elf::SHT_SYMTAB => {
                let (start, len) = section.file_range(endian)?;
                for index in place_of.keys().filter(|index| **index < len / SYMBOL) {
                    budget.spend(SYMBOL)?;
                    let other_at = start + index * SYMBOL + OTHER_AT;
                    let other = *bytes.get(usize::try_from(other_at).ok()?)?;
                    put(&mut made, other_at, [other & !MANAGED])?;
                }
                continue;
            }
            _ => continue,
        };
        let target = object::SectionIndex(section.sh_info(endian) as usize);
        let target = file.section_by_index(target).ok()?;
        if target.name().ok()?.starts_with(".debug") || target.name().ok()?.starts_with(".nv_debug")
        {
            continue;
        }
        let (content_at, content_len) = target.file_range()?;
        let (start, len) = section.file_range(endian)?;
        let each = if with_addend { 24 } else { 16 };
        let mut kept = 0;
        budget.spend(len)?;
        for number in 0..len / each {
            let record = start + number * each;
            let record_at = usize::try_from(record).ok()?;
            let record = bytes.get(record_at..record_at.checked_add(each as usize)?)?;
            let word = |at: usize| -> Option<u64> {
                let word = record.get(at..at + 8)?.try_into().ok()?;
                Some(u64::from_le_bytes(word))
            };
            let (offset, info) = (word(0)?, word(8)?);
            let Some(place) = place_of.get(&(info >> 32)) else {
                let to = start + kept * each;
                let to_at = usize::try_from(to).ok()?;
                made.get_mut(to_at..to_at + each as usize)?
                    .copy_from_slice(record);
                kept += 1;
                continue;
            };
            if offset.checked_add(8)? > content_len {
                return None;
            }
            let to = content_at + offset;
            let from = usize::try_from(to).ok()?;
            let there = u64::from_le_bytes(bytes.get(from..from + 8)?.try_into().ok()?);
            let addend = match (with_addend, info as u32) {
                (true, _) => word(16)?,
                (false, ADDRESS) => there,
                // The other half of an addend is in another instruction.
                (false, _) if there >> 32 == 0 => 0,
                _ => return None,
            };
            let address = place.wrapping_add(addend);
            match info as u32 {
                ADDRESS => put(&mut made, to, address.to_le_bytes())?,
                LOWER => put(&mut made, to + 4, (address as u32).to_le_bytes())?,
                UPPER => put(&mut made, to + 4, ((address >> 32) as u32).to_le_bytes())?,
                _ => return None,
            }
        }
        let headers_at = header.e_shoff.get(endian);
        let size_at = headers_at + at as u64 * u64::from(header.e_shentsize.get(endian)) + SIZE_AT;
        put(&mut made, size_at, (kept * each).to_le_bytes())?;
    }
    Some(made)
}

/// A piece of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Token {
    /// White space and comments.
    Space,
    /// A name, directive or number.
    Word,
    /// A string.
    Quoted,
    /// Any other character.
    Sign(u8),
}

/// Splits a text into tokens with their ends.
fn tokens(text: &str) -> Vec<(Token, &str)> {
    let bytes = text.as_bytes();
    let is_word = |byte: &u8| byte.is_ascii_alphanumeric() || b"_$%.".contains(byte);
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(byte) = bytes.get(at) {
        let rest = &bytes[at..];
        let run = |such: &dyn Fn(&u8) -> bool| rest.iter().take_while(|byte| such(byte)).count();
        let (token, len) = if byte.is_ascii_whitespace() {
            (Token::Space, run(&|byte| byte.is_ascii_whitespace()))
        } else if rest.starts_with(b"//") {
            (Token::Space, run(&|byte| *byte != b'\n'))
        } else if rest.starts_with(b"/*") {
            let end = memchr::memmem::find(rest, b"*/").map(|end| end + 2);
            (Token::Space, end.unwrap_or(rest.len()))
        } else if *byte == b'"' {
            let end = rest[1..].iter().position(|byte| *byte == b'"');
            (Token::Quoted, end.map_or(rest.len(), |end| end + 2))
        } else if is_word(byte) {
            (Token::Word, run(&is_word))
        } else {
            // Any other character of several bytes is inside a comment or a string of a valid text.
            let len = text[at..].chars().next().map_or(1, char::len_utf8);
            (Token::Sign(*byte), len)
        };
        found.push((token, &text[at..at + len]));
        at += len;
    }
    found
}

/// Directives that end with their line.
const LINES: [&str; 5] = [".version", ".target", ".address_size", ".file", ".loc"];

/// A statement of a text: its tokens up to the semicolon, brace, label's colon or end of the line.
struct Statement<'a> {
    tokens: Vec<(Token, &'a str)>,
    /// It is outside of functions.
    outside: bool,
}

/// Splits a text into statements. `None` if its braces do not match.
fn statements(text: &str) -> Option<Vec<Statement<'_>>> {
    let all = tokens(text);
    let mut found: Vec<Statement<'_>> = Vec::new();
    let mut current: Vec<(Token, &str)> = Vec::new();
    // Braces of blocks, and those inside a statement.
    let (mut depth, mut inside) = (0usize, 0usize);
    // The first word or sign of the statement.
    let mut first = None;
    let mut at = 0;
    while let Some(&(token, piece)) = all.get(at) {
        let next = all.get(at + 1).map(|(token, _)| *token);
        let before = current.last().map(|(token, _)| *token);
        current.push((token, piece));
        let outside = depth == 0;
        let ends = match token {
            Token::Sign(b'{') if inside > 0 => {
                inside += 1;
                false
            }
            Token::Sign(b'{') => {
                let has_value = current.iter().any(|(token, _)| *token == Token::Sign(b'='));
                let opens = if outside { !has_value } else { first.is_none() };
                match opens {
                    true => depth += 1,
                    false => inside += 1,
                }
                opens
            }
            Token::Sign(b'}') if inside > 0 => {
                inside -= 1;
                false
            }
            Token::Sign(b'}') => {
                depth = depth.checked_sub(1)?;
                true
            }
            Token::Sign(b';') => true,
            Token::Space if inside == 0 && piece.contains('\n') => {
                first.is_some_and(|first| LINES.contains(&first))
            }
            Token::Sign(b':') => {
                let double = next == Some(Token::Sign(b':')) || before == Some(Token::Sign(b':'));
                !double && !outside && inside == 0
            }
            _ => false,
        };
        if first.is_none() && token != Token::Space {
            first = Some(piece);
        }
        if ends {
            first = None;
            let tokens = std::mem::take(&mut current);
            found.push(Statement { tokens, outside });
        }
        at += 1;
    }
    if depth != 0 || inside != 0 {
        return None;
    }
    let outside = true;
    found.push(Statement {
        tokens: current,
        outside,
    });
    Some(found)
}

impl<'a> Statement<'a> {
    /// Its words and signs.
    fn pieces(&self) -> impl Iterator<Item = &'a str> {
        let pieces = self.tokens.iter();
        pieces
            .filter(|(token, _)| *token != Token::Space)
            .map(|(_, piece)| *piece)
    }

    fn is_managed(&self) -> bool {
        self.outside && self.pieces().any(|piece| piece == ".managed")
    }

    /// Whether it declares variables in the global state space. A parameter may point there: `.ptr .global`.
    fn declares_variables(&self) -> bool {
        let mut before = "";
        let mut pieces = self.pieces();
        self.outside
            && pieces
                .any(|piece| std::mem::replace(&mut before, piece) != ".ptr" && piece == ".global")
    }

    /// Whether it declares several variables: a comma lies before the initial value.
    fn declares_several(&self) -> bool {
        self.pieces()
            .take_while(|piece| *piece != "=")
            .any(|piece| piece == ",")
    }

    fn names(&self, places: &HashMap<&str, u64>) -> bool {
        let mut words = self
            .tokens
            .iter()
            .filter(|(token, _)| *token == Token::Word);
        words.any(|(_, word)| places.contains_key(word))
    }
}

/// Whether code of a text may write its variables. It may if an instruction other than a load names one, if a load names one
/// elsewhere than in its address, or if an initial value has the address of one. `is_constant` tells, by name and bytes, which
/// variables no code writes. `true` for a text that cannot be read.
pub fn may_write(text: &str, is_constant: impl Fn(&str, u64) -> bool) -> bool {
    let Some(statements) = statements(text) else {
        return true;
    };
    let mut names = Vec::new();
    for statement in statements.iter().filter(|one| one.declares_variables()) {
        let one = declared(statement).filter(|_| !statement.declares_several());
        match one {
            Some(one) if is_constant(&one.name, one.len) => {}
            Some(one) => names.push(one.name),
            None => return true,
        }
    }
    let variables: HashSet<&str> = names.iter().map(String::as_str).collect();
    statements.iter().any(|statement| {
        let pieces: Vec<&str> = statement.pieces().collect();
        let count = |pieces: &[&str]| {
            pieces
                .iter()
                .filter(|one| variables.contains(**one))
                .count()
        };
        if !statement.outside {
            return count(&pieces) > 0 && !only_loads(&pieces, &variables);
        }
        // Its declaration names it once, before its initial value.
        let value = pieces.iter().position(|piece| *piece == "=");
        let (declared, value) = pieces.split_at(value.unwrap_or(pieces.len()));
        count(declared) > usize::from(statement.declares_variables()) || count(value) > 0
    })
}

/// Whether an instruction loads, with none of these variables but as the base of its address:
/// `@%p1 ld.global.u64 %rd1, [name+8];`.
fn only_loads(pieces: &[&str], variables: &HashSet<&str>) -> bool {
    let mut at = pieces.iter().position(|piece| *piece != "{").unwrap_or(0);
    if pieces.get(at) == Some(&"@") {
        at += 1 + usize::from(pieces.get(at + 1) == Some(&"!")) + 1;
    }
    let Some((operation, operands)) = pieces.get(at..).and_then(<[&str]>::split_first) else {
        return false;
    };
    let loads = ["ld.", "ldu."]
        .iter()
        .any(|load| operation.starts_with(load));
    let is_base = |(at, _): &(usize, &&str)| *at > 0 && operands[at - 1] == "[";
    let mut named = operands
        .iter()
        .enumerate()
        .filter(|(_, piece)| variables.contains(*piece));
    loads && named.all(|one| is_base(&one))
}

fn variables_of_text(text: &str) -> Option<Vec<Variable>> {
    let managed = statements(text)?;
    let managed = managed.iter().filter(|one| one.is_managed());
    managed.map(declared).collect()
}

/// The variable that a statement declares, such as
/// `.visible .global .attribute(.managed) .align 4 .b8 name[2] = {1, 2};`.
fn declared(statement: &Statement<'_>) -> Option<Variable> {
    let mut pieces = statement.pieces().peekable();
    let (mut unit, mut count) = (0, 1u64);
    let name = loop {
        match pieces.next()? {
            ".visible" | ".weak" | ".common" | ".global" => {}
            ".attribute" => {
                let list = [pieces.next()?, pieces.next()?, pieces.next()?];
                if list != ["(", ".managed", ")"] {
                    return None;
                }
            }
            ".align" => drop(pieces.next()?),
            ".v2" => count *= 2,
            ".v4" => count *= 4,
            word if word.starts_with('.') => unit = bytes_of(word)?,
            name => break name,
        }
    };
    let mut open = false;
    while pieces.next_if_eq(&"[").is_some() {
        match pieces.next()? {
            "]" => open = true,
            number => {
                count = count.checked_mul(integer(number)?)?;
                (pieces.next()? == "]").then_some(())?;
            }
        }
    }
    let mut initial = Vec::new();
    if pieces.next_if_eq(&"=").is_some() {
        let mut negative = false;
        for piece in pieces.by_ref() {
            match piece {
                ";" => break,
                "{" | "}" | "," => {}
                "-" => negative = true,
                number => {
                    let value = value(number, unit)?;
                    let value = if negative {
                        value.wrapping_neg()
                    } else {
                        value
                    };
                    negative = false;
                    initial.extend_from_slice(value.to_le_bytes().get(..unit as usize)?);
                    (initial.len() <= MOST_INITIAL).then_some(())?;
                }
            }
        }
    }
    let len = match open {
        true => initial.len() as u64,
        false => count.checked_mul(unit)?,
    };
    (unit > 0 && initial.len() as u64 <= len).then(|| Variable {
        name: name.to_owned(),
        offset: 0,
        len,
        initial,
    })
}

/// Bytes of a type.
fn bytes_of(word: &str) -> Option<u64> {
    let bits: u64 = word
        .trim_start_matches(|c: char| !c.is_ascii_digit())
        .parse()
        .ok()?;
    let kind = word.trim_end_matches(|c: char| c.is_ascii_digit());
    let is_type = [".b", ".u", ".s", ".f"].contains(&kind);
    (is_type && [8, 16, 32, 64].contains(&bits)).then_some(bits / 8)
}

fn integer(word: &str) -> Option<u64> {
    let word = word.trim_end_matches('U');
    match word.strip_prefix("0x").or(word.strip_prefix("0X")) {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None if word.len() > 1 && word.starts_with('0') => u64::from_str_radix(word, 8).ok(),
        None => word.parse().ok(),
    }
}

/// The bits of a number of a type with this many bytes.
fn value(word: &str, unit: u64) -> Option<u64> {
    let bits = |prefix: [&str; 2]| {
        let digits = word
            .strip_prefix(prefix[0])
            .or(word.strip_prefix(prefix[1]))?;
        u64::from_str_radix(digits, 16).ok()
    };
    match (bits(["0f", "0F"]), bits(["0d", "0D"])) {
        (Some(single), _) if unit == 4 => Some(single),
        (_, Some(double)) if unit == 8 => Some(double),
        _ => integer(word),
    }
}

/// Removes the declarations, and gives each instruction that names a variable its address in a register.
fn text_at(text: &str, places: &HashMap<&str, u64>) -> Option<String> {
    let mut made = String::with_capacity(text.len() + text.len() / 8);
    for statement in statements(text)? {
        if statement.is_managed() {
            // Its lines stay, so that errors name the same ones.
            let pieces = statement.tokens.iter().map(|(_, piece)| *piece);
            made.extend(pieces.flat_map(str::chars).filter(|c| *c == '\n'));
        } else if !statement.names(places) {
            made.extend(statement.tokens.iter().map(|(_, piece)| *piece));
        } else if statement.outside {
            // An initial value, a parameter or a section for debuggers.
            return None;
        } else {
            made.push_str(&with_registers(&statement, places)?);
        }
    }
    Some(made)
}

fn with_registers(statement: &Statement<'_>, places: &HashMap<&str, u64>) -> Option<String> {
    let (mut loads, mut body, mut count) = (String::new(), String::new(), 0);
    let all = &statement.tokens;
    let solid = |mut at: usize| {
        while all.get(at).is_some_and(|(token, _)| *token == Token::Space) {
            at += 1;
        }
        at
    };
    let mut at = 0;
    while let Some((token, piece)) = all.get(at) {
        at += 1;
        let place = match token {
            Token::Word => places.get(piece),
            _ => None,
        };
        let Some(place) = place else {
            body.push_str(piece);
            continue;
        };
        // An offset behind the name belongs to the address.
        let mut address = *place;
        let sign = solid(at);
        if let Some((Token::Sign(sign_is @ (b'+' | b'-')), _)) = all.get(sign) {
            let mut number = solid(sign + 1);
            let mut negative = *sign_is == b'-';
            if let Some((Token::Sign(b'-'), _)) = all.get(number) {
                negative = !negative;
                number = solid(number + 1);
            }
            let offset = integer(all.get(number)?.1)?;
            address = match negative {
                true => address.wrapping_sub(offset),
                false => address.wrapping_add(offset),
            };
            at = number + 1;
        }
        loads.push_str(&format!(" mov.u64 %mpsshim_managed{count}, {address};"));
        body.push_str(&format!("%mpsshim_managed{count}"));
        count += 1;
    }
    let indent = all.iter().take_while(|(token, _)| *token == Token::Space);
    let indent: usize = indent.map(|(_, piece)| piece.len()).sum();
    let (indent, body) = body.split_at_checked(indent)?;
    body.ends_with(';')
        .then(|| format!("{indent}{{ .reg .b64 %mpsshim_managed<{count}>;{loads} {body} }}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::gpu::cubin::calls;
    use proptest::prelude::*;

    /// The same variables, as nvcc compiles them.
    const CUBINS: [&[u8]; 3] = [
        include_bytes!("../../../../tests/fixtures/managed/variables.sm_90.cubin"),
        include_bytes!("../../../../tests/fixtures/managed/variables.sm_75.cubin"),
        include_bytes!("../../../../tests/fixtures/managed/variables.debug.cubin"),
    ];
    const TEXT: &str = include_str!("../../../../tests/fixtures/managed/variables.ptx");
    const BASE: u64 = 0x7f12_3456_7000;

    fn names(image: &ManagedImage) -> Vec<(&str, u64)> {
        let names = image.variables.iter();
        let mut names: Vec<_> = names.map(|one| (one.name.as_str(), one.len)).collect();
        names.sort();
        names
    }

    fn initial(image: &ManagedImage, name: &str) -> Vec<u8> {
        let one = image.variables.iter().find(|one| one.name == name);
        let one = one.expect("a variable");
        let mut bytes = one.initial.clone();
        bytes.resize(one.len as usize, 0);
        bytes
    }

    #[test]
    fn variables_are_found_with_their_initial_values() {
        let table: Vec<u8> = [1.5f64, -2.5, 0.0]
            .iter()
            .flat_map(|one| one.to_le_bytes())
            .collect();
        for image in CUBINS.iter().copied().chain([TEXT.as_bytes()]) {
            let found = ManagedImage::of(image, 90).expect("an image");
            let expected = [("counter", 4), ("table", 24), ("values", 4000)];
            assert_eq!(names(&found), expected);
            assert_eq!(initial(&found, "counter"), 5i32.to_le_bytes());
            assert_eq!(initial(&found, "table"), table);
            assert_eq!(initial(&found, "values"), [0; 4000]);
            let ends = found.variables.iter().map(|one| one.offset + one.len);
            assert!(ends.max().is_some_and(|end| end <= found.len()));
            assert!(found.variables.iter().all(|one| one.offset % ALIGN == 0));
        }
    }

    /// All words of four bytes in the sections that devices use.
    fn words(cubin: &[u8]) -> Vec<u32> {
        let file = ElfFile64::<Endianness>::parse(cubin).expect("a cubin");
        let used = file.sections().filter(|one| {
            let name = one.name().unwrap_or_default();
            name.starts_with(".text") || name.starts_with(".nv.constant")
        });
        let all = used.flat_map(|one| one.data().unwrap_or_default().chunks_exact(4));
        let word = |chunk: &[u8]| u32::from_le_bytes(chunk.try_into().expect("four bytes"));
        all.map(word).collect()
    }

    /// Names of the symbols that relocations of such sections refer to.
    fn relocated(cubin: &[u8]) -> Vec<String> {
        let file = ElfFile64::<Endianness>::parse(cubin).expect("a cubin");
        let used = file.sections().filter(|one| {
            let name = one.name().unwrap_or_default();
            name.starts_with(".text") || name.starts_with(".nv.constant")
        });
        let targets = used.flat_map(|one| one.relocations());
        let names = targets.filter_map(|(_, one)| match one.target() {
            object::RelocationTarget::Symbol(index) => {
                let symbol = file.symbol_by_index(index).ok()?;
                symbol.name().ok().map(str::to_owned)
            }
            _ => None,
        });
        names.collect()
    }

    #[test]
    fn a_cubin_has_the_addresses_of_the_block() {
        for cubin in CUBINS {
            assert!(calls(cubin, &[90]).managed);
            let image = ManagedImage::of(cubin, 90).expect("an image");
            let made = image.at(BASE).expect("code");
            assert_eq!(made.len(), cubin.len());
            assert!(!calls(&made, &[90]).managed, "it is an ordinary image");
            let (before, after) = (words(cubin), words(&made));
            let added = |word: u32| {
                let count = |words: &[u32]| words.iter().filter(|one| **one == word).count();
                count(&after) - count(&before)
            };
            for one in &image.variables {
                assert!(added((BASE + one.offset) as u32) > 0, "{}", one.name);
            }
            assert!(added((BASE >> 32) as u32) >= image.variables.len());
            let left = relocated(&made);
            assert!(left.contains(&"plain".into()), "{left:?}");
            for name in ["counter", "values", "table"] {
                assert!(relocated(cubin).iter().any(|one| one == name));
                assert!(!left.iter().any(|one| one == name), "{left:?}");
            }
        }
    }

    #[test]
    fn an_unknown_way_to_use_a_variable_is_refused() {
        let cubin = CUBINS[0];
        let file = ElfFile64::<Endianness>::parse(cubin).expect("a cubin");
        let section = file.section_by_name(".rela.nv.constant4");
        let (start, len) = section.and_then(|one| one.file_range()).expect("a section");
        let mut other = cubin.to_vec();
        for record in 0..len / 24 {
            // The type of the relocation.
            other[(start + record * 24 + 8) as usize] = 77;
        }
        assert!(ManagedImage::of(&other, 90).is_none());
    }

    fn rewritten(body: &str) -> Option<String> {
        let text = format!(
            ".global .attribute(.managed) .align 4 .u32 x = 5;\n.visible .entry k()\n{{\n{body}\n}}\n"
        );
        let image = ManagedImage::of(text.as_bytes(), 90)?;
        let made = String::from_utf8(image.at(4096)?).expect("text");
        let body = made.strip_prefix("\n.visible .entry k()\n{\n");
        Some(
            body.expect(&made)
                .strip_suffix("\n}\n")
                .expect(&made)
                .into(),
        )
    }

    #[test]
    fn instructions_get_the_address_in_a_register() {
        let with = |address: u64, instruction: &str| {
            format!(
                "{{ .reg .b64 %mpsshim_managed<1>; mov.u64 %mpsshim_managed0, {address}; {instruction} }}"
            )
        };
        let m = "%mpsshim_managed0";
        for (before, after) in [
            (
                "mov.u64 %rd1, x;",
                with(4096, &format!("mov.u64 %rd1, {m};")),
            ),
            (
                "ld.u32 %r1, [x];",
                with(4096, &format!("ld.u32 %r1, [{m}];")),
            ),
            (
                "ld.u32 %r1, [x+8];",
                with(4104, &format!("ld.u32 %r1, [{m}];")),
            ),
            (
                "ld.u32 %r1, [x + -8];",
                with(4088, &format!("ld.u32 %r1, [{m}];")),
            ),
            (
                "$L_1: @%p1 st.v2.u32 [x], {%r1, %r2};",
                format!(
                    "$L_1: {}",
                    with(4096, &format!("@%p1 st.v2.u32 [{m}], {{%r1, %r2}};"))
                ),
            ),
            ("mov.u32 %x, 1; // x", "mov.u32 %x, 1; // x".into()),
            ("{ .reg .b32 xx; }", "{ .reg .b32 xx; }".into()),
            (
                "st.shared::cta.u32 [a], 1;\n\tst.u32 [x], 2;",
                format!(
                    "st.shared::cta.u32 [a], 1;\n\t{}",
                    with(4096, &format!("st.u32 [{m}], 2;"))
                ),
            ),
        ] {
            assert_eq!(rewritten(before), Some(after), "{before}");
        }
        let both = "add.u64 %rd1, x, x;";
        assert!(
            rewritten(both)
                .expect("text")
                .contains("%mpsshim_managed<2>;")
        );
    }

    #[test]
    fn a_text_keeps_its_lines_and_other_variables() {
        let image = ManagedImage::of(TEXT.as_bytes(), 75).expect("an image");
        let made = String::from_utf8(image.at(BASE).expect("code")).expect("text");
        assert_eq!(made.lines().count(), TEXT.lines().count());
        assert!(!made.contains("managed)") && made.contains("plain = 7;"));
        let again = ManagedImage::of(made.as_bytes(), 75).expect("an image");
        assert_eq!((again.variables.len(), again.len()), (0, 0));
    }

    #[test]
    fn values_of_all_types() {
        let declare = |declaration: &str| {
            let text = format!(".visible .global .attribute(.managed) {declaration};\n");
            let image = ManagedImage::of(text.as_bytes(), 90)?;
            let one = image.variables.into_iter().next()?;
            Some((one.name, one.len, one.initial))
        };
        let is = |declaration: &str, len: u64, bytes: &[u8]| {
            let expected = Some(("v".to_owned(), len, bytes.to_vec()));
            assert_eq!(declare(declaration), expected, "{declaration}");
        };
        is(".align 8 .u64 v = 0x10", 8, &16u64.to_le_bytes());
        is(".s16 v = -2", 2, &(-2i16).to_le_bytes());
        is(".f32 v = 0f3FC00000", 4, &1.5f32.to_le_bytes());
        is(".f64 v = 0dC004000000000000", 8, &(-2.5f64).to_le_bytes());
        is(".v4 .f32 v", 16, &[]);
        is(".b8 v[] = {1, 2, 3}", 3, &[1, 2, 3]);
        is(".b16 v[2][3] = {{1}, {2}}", 12, &[1, 0, 2, 0]);
        for refused in [
            ".u64 v = other",
            ".b8 v[1] = {1, 2}",
            ".texref v",
            ".pred v",
            ".u64 v = generic(w)",
        ] {
            assert_eq!(declare(refused), None, "{refused}");
        }
    }

    #[test]
    fn variables_that_are_only_loaded_are_not_written() {
        let writes = |code: &str| {
            let text = format!(
                ".version 8.0\n.target sm_80\n.global .align 8 .u64 table;\n.global .u32 other[4];\n{code}"
            );
            may_write(&text, |name, _| name == "other")
        };
        let kernel = |code: &str| {
            format!(".visible .entry k(.param .u64 p)\n{{\n.reg .b64 %rd<9>;\n{code}\nret;\n}}\n")
        };
        for code in [
            "ld.global.u64 %rd1, [table];",
            "@%p1 ld.global.u64 %rd1, [table+8];",
            "@!%p1 ld.volatile.global.v2.u32 {%r1, %r2}, [ table ];",
            "{ ld.global.nc.u64 %rd1, [table]; }",
            "L1: ldu.global.u64 %rd1, [table]; // st.global.u64 [table], %rd1;",
            "st.global.u64 [other], %rd1; mov.u64 %rd2, other;",
        ] {
            assert!(!writes(&kernel(code)), "{code}");
        }
        for code in [
            "st.global.u64 [table], %rd1;",
            "atom.global.add.u64 %rd1, [table], %rd2;",
            "red.global.add.u64 [table+8], %rd2;",
            "mov.u64 %rd1, table;",
            "cvta.global.u64 %rd1, table;",
            "ld.global.u64 %rd1, [%rd2]; @%p1 st.global.u64 [table], %rd1;",
            "prefetch.global.L2 [table];",
            "call (r), f, (table);",
            "ld.global.u64 %rd1, [other+table];",
        ] {
            assert!(writes(&kernel(code)), "{code}");
        }
        let elsewhere = ".global .u64 where = table;\n.global .u64 list[2] = {0, table};";
        for one in elsewhere.lines() {
            assert!(writes(&format!("{one}\n{}", kernel("ret;"))), "{one}");
        }
        let commented = ".global .u32 /* a */ counter /* b */;";
        assert!(!writes(&format!("{commented}\n{}", kernel("ret;"))));
        for one in [
            "{{",
            ".global .u32 a, b;",
            ".extern .global .u32 table;",
            &format!("{commented}\n{}", kernel("st.u32 [counter], 1;")),
        ] {
            assert!(writes(one), "{one}");
        }
    }

    #[test]
    fn uses_outside_of_functions_are_refused() {
        let text = |further: &str| format!(".global .attribute(.managed) .u32 x;\n{further}\n");
        assert!(ManagedImage::of(text("").as_bytes(), 90).is_some());
        for further in [
            ".global .u64 p = x;",
            ".section .debug_info\n{\n.b64 x\n}",
            ".visible .entry k() {",
            "}",
        ] {
            assert!(
                ManagedImage::of(text(further).as_bytes(), 90).is_none(),
                "{further}"
            );
        }
    }

    proptest! {
        #[test]
        fn any_image_is_read_or_refused(
            at in 0..6000usize, byte: u8, which in 0..3usize, text in ".{0,200}"
        ) {
            let mut cubin = CUBINS[which].to_vec();
            let at = at % cubin.len();
            cubin[at] = byte;
            if let Some(image) = ManagedImage::of(&cubin, 90) {
                prop_assert!(image.at(BASE).is_some());
            }
            let text = TEXT.replacen("ld.param", &text, 1);
            let _ = ManagedImage::of(text.as_bytes(), 90);
        }
    }
}
