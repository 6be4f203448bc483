//! Static analysis of the code in an image: which variables it can write, and so whether clients that load the same
//! content can share one copy; and whether it prints.
//!
//! NVIDIA does not document the layout of a fatbin's entries; this module assumes the output of `nvcc -fatbin` of CUDA
//! 11 to 13. An image that deviates is not shared, so a mistake costs only memory.

use crate::engine::base::pinned::is_affordable;
use crate::engine::gpu::managed_image;
use crate::engine::gpu::system_scope::{SystemScope, arch_of};
use mpsshim_proto::message::{FUNCTION_PRINTS, FUNCTION_SYSTEM_SCOPE};
use object::read::elf::{ElfFile64, ElfSymbol64, FileHeader};
use object::{
    Endianness, Object, ObjectSection, ObjectSymbol, Relocation, RelocationFlags, RelocationTarget,
    SectionIndex, SectionKind, SymbolIndex, SymbolKind,
};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::{BTreeSet, HashSet};
use std::ops::Range;

/// The largest code that is analyzed, bytes.
const MAX_CODE: u64 = 1 << 30;

/// One entry of a fatbin.
#[derive(Debug)]
pub struct Entry<'a> {
    pub kind: u16,
    /// Compute capability, `10 * major + minor`.
    pub arch: u32,
    flags: u64,
    code: &'a [u8],
    /// Uncompressed size, bytes; 0 if the code is not compressed.
    whole: u64,
}

/// The first bytes of a cubin.
pub const ELF: &[u8] = b"\x7fELF";
/// The ELF machine of a cubin.
pub const EM_CUDA: u16 = 190;
/// The first bytes of a fatbin.
pub const FATBIN: [u8; 4] = 0xBA55_ED50u32.to_le_bytes();
/// Minimum sizes of the headers of a fatbin and of an entry, bytes. They guarantee progress through any image.
const HEADER: usize = 16;
const ENTRY: usize = 64;
pub const KIND_TEXT: u16 = 1;
pub const KIND_CUBIN: u16 = 2;
const LZ4: u64 = 0x2000;
const ZSTD: u64 = 0x8000;

fn field<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

/// Counts scanned bytes, for tests.
mod work {
    #[cfg(test)]
    thread_local! {
        pub static BYTES: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
    }

    /// Adds to the number of scanned bytes.
    #[inline]
    pub fn count(_bytes: usize) {
        #[cfg(test)]
        BYTES.set(BYTES.get() + _bytes);
    }
}

/// Bytes that may still be scanned. Items in an image can overlap, and compressed code can be far longer than the
/// image; the budget keeps the scan linear in the image's length.
pub struct Budget(u64);

/// Maximum number of an image's variables that are logged.
const NAMED: usize = 16;

/// Bytes charged for a relocation.
const RELOCATION: u64 = 16;

impl Budget {
    /// For names in an image, which may overlap slightly.
    pub fn of_names(image: &[u8]) -> Budget {
        Budget(4 * image.len() as u64)
    }

    /// For compressed code: the ratios that compiler output reaches, plus an allowance for small images, which may
    /// exceed them.
    pub fn of_code(image: &[u8]) -> Budget {
        Budget((64 << 20) + 64 * image.len() as u64)
    }

    /// `None` if it is exhausted.
    pub fn spend(&mut self, bytes: u64) -> Option<()> {
        self.0 = self.0.checked_sub(bytes)?;
        Some(())
    }
}

/// Where the entries of a fatbin are, which ends with them; `None` if its header is not sound.
pub fn entries_at(fatbin: &[u8]) -> Option<Range<usize>> {
    let header = u16::from_le_bytes(field(fatbin, 6)?) as usize;
    let len = u64::from_le_bytes(field(fatbin, 8)?) as usize;
    let range = header..header.checked_add(len)?;
    (header >= HEADER && range.end <= fatbin.len()).then_some(range)
}

/// The entries of a fatbin, or of several concatenated ones.
pub fn entries(mut bytes: &[u8]) -> Option<Vec<Entry<'_>>> {
    let mut found = Vec::new();
    while bytes.len() >= HEADER && bytes.starts_with(&FATBIN) {
        let range = entries_at(bytes)?;
        let mut inside = bytes.get(range.clone())?;
        while inside.len() >= ENTRY {
            work::count(ENTRY);
            let head = u32::from_le_bytes(field(inside, 4)?) as usize;
            let size = u64::from_le_bytes(field(inside, 8)?) as usize;
            if head < ENTRY {
                return None;
            }
            let compressed = u32::from_le_bytes(field(inside, 16)?) as usize;
            let code = inside.get(head..head.checked_add(size)?)?;
            let flags = u64::from_le_bytes(field(inside, 40)?);
            let whole = u64::from_le_bytes(field(inside, 56)?);
            let is_compressed = flags & (LZ4 | ZSTD) != 0;
            found.push(Entry {
                kind: u16::from_le_bytes(field(inside, 0)?),
                arch: u32::from_le_bytes(field(inside, 28)?),
                flags,
                code: if is_compressed {
                    code.get(..compressed)?
                } else {
                    code
                },
                whole: if is_compressed { whole } else { 0 },
            });
            inside = &inside[head + size..];
        }
        bytes = &bytes[range.end..];
    }
    Some(found)
}

impl<'a> Entry<'a> {
    /// Whether a device of a compute capability (`10 * major + minor`) runs this code.
    pub fn fits(&self, arch: u32) -> bool {
        self.kind == KIND_CUBIN && self.arch / 10 == arch / 10 && self.arch <= arch
    }

    pub fn content(&self, budget: &mut Budget) -> Option<Cow<'a, [u8]>> {
        if self.whole == 0 {
            return Some(Cow::Borrowed(self.code));
        }
        budget.spend(self.whole)?;
        if self.whole > MAX_CODE || !is_affordable(2 * self.whole) {
            return None;
        }
        let whole = self.whole as usize;
        if self.flags & ZSTD != 0 {
            use std::io::Read;
            let decoder = ruzstd::decoding::StreamingDecoder::new(self.code).ok()?;
            let mut bytes = Vec::with_capacity(whole);
            decoder.take(self.whole + 1).read_to_end(&mut bytes).ok()?;
            (bytes.len() == whole).then_some(Cow::Owned(bytes))
        } else {
            let bytes = lz4_flex::block::decompress(self.code, whole).ok()?;
            (bytes.len() == whole).then_some(Cow::Owned(bytes))
        }
    }
}

/// Whether a variable is never written: literals, tables of NVIDIA's own device libraries (CUDA math, cuRAND), and the
/// empty objects that NVIDIA's C++ libraries define in each file that includes them.
pub fn is_constant(name: &str, size: u64) -> bool {
    // Literals of nvcc and LLVM, then constants of a header that nvcc includes in each file and of CuPy's headers.
    const LITERALS: [&str; 7] = [
        "$str",
        "_$_str",
        "__unnamed_",
        "_ZN26__nv_atomic_triv_cp_helperI",
        "_ZN6CArrayI",
        "_ZN8CIndexerI",
        "_ZN4cupy11type_traits",
    ];
    const TABLES: [&str; 5] = [
        "__cudart_i2opi_",
        "__cudart_sin_cos_coeffs",
        "precalc_xorwow_",
        "mrg32k3aM",
        "__cr_lgamma_table",
    ];
    const NAMESPACES: [&str; 7] = [
        "4cuda3std",
        "4cuda3__4",
        "4cuda9execution",
        "6thrust",
        "3cub",
        "4cute",
        "7cutlass",
    ];
    let begins = |with: &[&str]| with.iter().any(|start| name.starts_with(start));
    let is_empty = || {
        size == 1
            && name.starts_with("_ZN")
            && name.contains("_INTERNAL_")
            && NAMESPACES.iter().any(|namespace| name.contains(namespace))
    };
    begins(&LITERALS) || begins(&TABLES) || is_empty()
}

/// Symbols whose addresses the code or data of a cubin uses. The driver chooses the addresses of variables when it loads a
/// cubin, so each use has a relocation, in the code or in a constant bank that the code reads.
pub enum Used {
    /// Possibly those of all symbols.
    All,
    /// Of these.
    Some(HashSet<SymbolIndex>),
}

/// The constant bank with the addresses of all variables, whether code uses them or not: 8 bytes for each.
const ADDRESSES: &[u8] = b".nv.constant4";

impl Used {
    /// Those of all relocations but the debugger's; `None` beyond the budget.
    pub fn of(file: &ElfFile64<'_, Endianness>, budget: &mut Budget) -> Option<Used> {
        let (mut found, mut bank) = (HashSet::new(), Vec::new());
        for section in file.sections() {
            let name = section.name_bytes().unwrap_or_default();
            budget.spend(name.len() as u64)?;
            // Another encoding of the same code, with relocations of its own.
            if name.starts_with(b".nv.merc") || name.starts_with(b".nv.capmerc") {
                return Some(Used::All);
            }
            if name.starts_with(b".debug") {
                continue;
            }
            for (offset, relocation) in section.relocations() {
                budget.spend(RELOCATION)?;
                let RelocationTarget::Symbol(index) = relocation.target() else {
                    return Some(Used::All);
                };
                if file.symbol_by_index(index).ok()?.kind() == SymbolKind::Section {
                    return Some(Used::All);
                }
                match name == ADDRESSES {
                    true => bank.push((offset, index)),
                    false => drop(found.insert(index)),
                }
            }
        }
        if !bank.is_empty() {
            let Some(read) = reads_of_addresses(file, budget)? else {
                return Some(Used::All);
            };
            let is_read = |offset: u64| read.range(offset.saturating_sub(15)..offset + 8).next();
            let used = bank.iter().filter(|(at, _)| is_read(*at).is_some());
            found.extend(used.map(|(_, index)| *index));
        }
        Some(Used::Some(found))
    }

    /// Whether the address of this symbol may be used.
    pub fn has(&self, symbol: SymbolIndex) -> bool {
        match self {
            Used::All => true,
            Used::Some(found) => found.contains(&symbol),
        }
    }
}

/// The offsets at which the code of a cubin reads the bank of [`ADDRESSES`], up to 16 bytes each. `Some(None)`: any, or code
/// whose encoding is unknown. `None` beyond the budget.
///
/// NVIDIA does not document the encoding. In the code that ptxas 13.0 makes for compute capabilities 7.5 to 9.0, an operand
/// in a constant bank has its number in bits 54 to 58 and its offset in bits 38 to 53 of an instruction's first half; `LDC`
/// and `ULDC` add a register, in bits 24 to 31. Bits 9 to 11 are the form of the operands, of which two have a constant
/// bank; in the others, these bits are part of an immediate operand or of modifiers.
fn reads_of_addresses(
    file: &ElfFile64<'_, Endianness>,
    budget: &mut Budget,
) -> Option<Option<BTreeSet<u64>>> {
    const BANK: u64 = 4;
    const LDC: (u64, &[u64]) = (0xb82, &[0xff]);
    const ULDC: (u64, &[u64]) = (0xab9, &[0, 0x3f, 0xff]);
    const WITH_BANK: [u64; 2] = [3, 5];
    if arch_of(file).is_none_or(|arch| !(75..=90).contains(&arch)) {
        return Some(None);
    }
    let mut found = BTreeSet::new();
    for section in file.sections() {
        let name = section.name_bytes().unwrap_or_default();
        if section.kind() != SectionKind::Text && !name.starts_with(b".text") {
            continue;
        }
        let Ok(code) = section.data() else {
            return Some(None);
        };
        work::count(code.len());
        budget.spend(code.len() as u64)?;
        for instruction in code.as_chunks::<16>().0 {
            let mut first = [0; 8];
            first.copy_from_slice(&instruction[..8]);
            let first = u64::from_le_bytes(first);
            if first >> 54 & 0x1f != BANK || !WITH_BANK.contains(&(first >> 9 & 7)) {
                continue;
            }
            let (opcode, register) = (first & 0xfff, first >> 24 & 0xff);
            let adds = |(of, none): (u64, &[u64])| opcode == of && !none.contains(&register);
            if adds(LDC) || adds(ULDC) {
                return Some(None);
            }
            found.insert(first >> 38 & 0xffff);
        }
    }
    Some(Some(found))
}

/// Whether no kernel of a cubin can change state of the cubin that another kernel sees.
fn is_constant_cubin(bytes: &[u8]) -> Option<bool> {
    let file = ElfFile64::<Endianness>::parse(bytes).ok()?;
    if file.elf_header().e_machine(file.endian()) != EM_CUDA {
        return Some(false);
    }
    let mut budget = Budget::of_names(bytes);
    let mut writable = HashSet::new();
    for section in file.sections() {
        let name = section.name_bytes().unwrap_or_default();
        work::count(name.len());
        budget.spend(name.len() as u64)?;
        if name.starts_with(b".nv.global") && section.size() > 0 {
            writable.insert(section.index());
        }
    }
    let mut named = 0;
    let mut kept = Vec::new();
    for symbol in file.symbols() {
        let Some(section) = symbol.section_index() else {
            continue;
        };
        if !writable.contains(&section) || symbol.kind() == SymbolKind::Section {
            continue;
        }
        named += 1;
        let name = symbol.name().ok()?;
        work::count(name.len());
        budget.spend(name.len() as u64)?;
        if !is_constant(name, symbol.size()) {
            kept.push((symbol.index(), name));
        }
    }
    if !kept.is_empty() {
        let used = Used::of(&file, &mut budget)?;
        kept.retain(|(index, _)| used.has(*index));
    }
    if !kept.is_empty() {
        let kept: Vec<_> = kept.iter().take(NAMED).map(|(_, name)| *name).collect();
        tracing::debug!(?kept, "kernels may write variables");
        return Some(false);
    }
    // Variables without names cannot be recognized as constants.
    Some(writable.is_empty() || named > 0)
}

/// Whether a PTX text declares no variable that its kernels write: looks for `.global` at the beginning of a statement.
/// (Only the host writes `.const` variables, and after a dot, `.global` is part of an instruction.)
fn is_constant_text(bytes: &[u8]) -> bool {
    /// Longest text whose instructions are examined, bytes.
    const LONGEST: usize = 1 << 20;
    let ends = |byte: &u8| byte.is_ascii_whitespace() || matches!(byte, b';' | b'}' | b'{' | b'/');
    // End of the text scanned so far. Only the words at a declaration's end matter, so further `.global` within it, of
    // which a comment may contain any number, are skipped.
    let mut seen = 0;
    let are_constant = memchr::memmem::find_iter(bytes, b".global").all(|at| {
        let before = &bytes[..at];
        let declares =
            before.last().is_none_or(ends) && !before.trim_ascii_end().ends_with(b".ptr");
        if !declares || at < seen {
            return true;
        }
        let Some((name, size, end)) = declared(&bytes[at..]) else {
            return false;
        };
        seen = at + end;
        is_constant(name, size)
    });
    if are_constant || bytes.len() > LONGEST {
        return are_constant;
    }
    work::count(bytes.len());
    let text = bytes.split(|byte| *byte == 0).next();
    let text = text.and_then(|text| std::str::from_utf8(text).ok());
    text.is_some_and(|text| !managed_image::may_write(text, is_constant))
}

/// Name and size of the byte array that a statement declares, and the position after the name; the size is 0 for any
/// other variable.
fn declared(statement: &[u8]) -> Option<(&str, u64, usize)> {
    let end = statement
        .iter()
        .position(|byte| matches!(byte, b'[' | b';' | b'='))?;
    work::count(end);
    let words = std::str::from_utf8(&statement[..end]).ok()?;
    let mut words = words.split_ascii_whitespace().rev();
    let name = words.next()?;
    let of_bytes = matches!(words.next(), Some(".b8" | ".u8" | ".s8"));
    let behind = statement.get(end + 1..)?;
    let digits = behind
        .iter()
        .take_while(|byte| byte.is_ascii_digit())
        .count();
    work::count(digits);
    let count = std::str::from_utf8(&behind[..digits]).ok()?;
    let array = of_bytes && statement[end] == b'[';
    let size = if array { count.parse().ok()? } else { 0 };
    Some((name, size, end))
}

/// Whether all code of an image that a device of a compute capability (`10 * major + minor`) would run keeps no state
/// between launches.
pub fn keeps_nothing(image: &[u8], arch: u32) -> bool {
    of_all_code(image, arch, is_constant_cubin, is_constant_text)
}

/// Functions of the driver's whose addresses a kernel does not store.
const HARMLESS: [&str; 3] = ["__assertfail", "vprintf", "cudaGraphSetConditional"];
/// Functions of the driver's that allocate memory, and free it.
const ALLOCATING: [&str; 2] = ["malloc", "free"];

/// Whether a symbol is a function that the driver provides.
pub fn is_of_driver(name: &str) -> bool {
    HARMLESS.contains(&name) || ALLOCATING.contains(&name)
}

/// Whether the kernels of a cubin store no addresses in memory that become invalid when it is reloaded elsewhere. The
/// functions whose addresses it uses (as for virtual function tables), or that the driver provides (as for memory that
/// kernels allocate), may only be [`HARMLESS`]. Addresses of literals and variables are ignored, because a kernel obtains
/// them anew at its next launch.
fn stores_nothing_cubin(bytes: &[u8]) -> Option<bool> {
    const BANKS: [&[u8]; 3] = [b".nv.constant2", b".nv.constant4", b".nv.global"];
    let file = ElfFile64::<Endianness>::parse(bytes).ok()?;
    if file.elf_header().e_machine(file.endian()) != EM_CUDA {
        return Some(false);
    }
    let mut budget = Budget::of_names(bytes);
    for section in file.sections() {
        let name = section.name_bytes().unwrap_or_default();
        budget.spend(name.len() as u64)?;
        let is_code = name.starts_with(b".text");
        if !is_code && !BANKS.iter().any(|bank| name.starts_with(bank)) {
            continue;
        }
        for (_, relocation) in section.relocations() {
            budget.spend(RELOCATION)?;
            let RelocationTarget::Symbol(index) = relocation.target() else {
                tracing::debug!("an address of a section in a constant bank");
                return Some(false);
            };
            let symbol = file.symbol_by_index(index).ok()?;
            let name = symbol.name().unwrap_or_default();
            let is_stored = match is_code {
                true => is_taken_by_code(&file, &symbol, (section.index(), &relocation)),
                false => {
                    let is_data = matches!(symbol.kind(), SymbolKind::Data | SymbolKind::Section);
                    !is_data && !HARMLESS.contains(&name)
                }
            };
            if is_stored || name.starts_with("_ZTV") {
                tracing::debug!(name, "kernels may store an address of the image");
                return Some(false);
            }
        }
    }
    Some(true)
}

/// Whether code takes the address of a function by a relocation, or calls a function of the driver's that may allocate
/// memory. Code that is compiled as a whole has these addresses in a constant bank; linked code (`nvcc -rdc=true`) has them
/// in its instructions.
fn is_taken_by_code(
    file: &ElfFile64<'_, Endianness>,
    symbol: &ElfSymbol64<'_, '_, Endianness>,
    (from, relocation): (SectionIndex, &Relocation),
) -> bool {
    /// The target of a call, for compute capabilities up to 8.9, and from 9.0 on.
    const CALLS: [u32; 2] = [0x3a, 0x4b];
    let name = symbol.name().unwrap_or_default();
    if symbol.is_undefined() {
        let is_function = matches!(symbol.kind(), SymbolKind::Text | SymbolKind::Unknown);
        return is_function && !name.is_empty() && !HARMLESS.contains(&name);
    }
    let Some(to) = symbol.section_index() else {
        return false;
    };
    let section = file.section_by_index(to);
    if !section.is_ok_and(|to| to.name_bytes().unwrap_or_default().starts_with(b".text")) {
        return false;
    }
    let is_call =
        matches!(relocation.flags(), RelocationFlags::Elf { r_type } if CALLS.contains(&r_type));
    // The address behind a call, to which the function returns.
    let is_return = to == from && relocation.addend() != 0;
    !is_call && !is_return
}

/// Whether the kernels of a PTX text store no such addresses (see [`stores_nothing_cubin`]), judged by the keywords
/// that such code needs.
fn stores_nothing_text(bytes: &[u8]) -> bool {
    const WORDS: [&[u8]; 3] = [b"malloc", b".callprototype", b".calltargets"];
    let has = |word: &&[u8]| memchr::memmem::find(bytes, word).is_some();
    !WORDS.iter().any(has)
}

/// State of an image that is lost if it is reloaded elsewhere between two launches of its kernels.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leaves {
    /// Its kernels may write its variables, and a new load resets them.
    pub variables: bool,
    /// Its kernels may store addresses of its functions, or of memory that they allocate; these cannot be translated.
    pub addresses: bool,
}

/// State left by the code of an image that a device of a compute capability (`10 * major + minor`) would run.
pub fn leaves(image: &[u8], arch: u32) -> Leaves {
    Leaves {
        variables: !keeps_nothing(image, arch),
        addresses: !of_all_code(image, arch, stores_nothing_cubin, stores_nothing_text),
    }
}

fn of_all_code(
    image: &[u8],
    arch: u32,
    of_cubin: impl Fn(&[u8]) -> Option<bool>,
    of_text: impl Fn(&[u8]) -> bool,
) -> bool {
    if image.starts_with(ELF) {
        return of_cubin(image).unwrap_or(false);
    }
    let Some(entries) = entries(image) else {
        return false;
    };
    if entries.is_empty() {
        return of_text(image);
    }
    let runs = |entry: &Entry<'_>| entry.fits(arch);
    // If no cubin fits, the driver compiles a text, and it may choose any of them.
    let compiled = !entries.iter().any(runs);
    let mut code = entries
        .iter()
        .filter(|entry| {
            if compiled {
                entry.kind == KIND_TEXT
            } else {
                runs(entry)
            }
        })
        .peekable();
    let mut budget = Budget::of_code(image);
    code.peek().is_some()
        && code.all(|entry| {
            let content = entry.content(&mut budget);
            content.is_some_and(|bytes| match compiled {
                true => of_text(&bytes),
                false => of_cubin(&bytes).unwrap_or(false),
            })
        })
}

/// Functions of the driver that kernels of an image may call, its managed variables, and kernels with accesses to memory
/// that the host or other devices may see while they run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Calls {
    /// `printf`. Code that is unreadable, or exceeds the [`Budget`], counts as printing.
    pub prints: bool,
    /// `malloc` or `free`, but no launches. Code that is unreadable, or exceeds the [`Budget`], counts as not allocating.
    pub allocates: bool,
    /// It has managed variables. Code that is unreadable, or exceeds the [`Budget`], counts as having none.
    pub managed: bool,
    /// Kernels with system-scope accesses. Code that is unreadable, or exceeds the [`Budget`], counts as having them in
    /// all kernels.
    pub system_scope: SystemScope,
}

impl Calls {
    /// Code that cannot be read.
    const UNREADABLE: Calls = Calls {
        prints: true,
        allocates: false,
        managed: false,
        system_scope: SystemScope::All,
    };

    fn of_cubin(code: &[u8]) -> Calls {
        if !code.starts_with(ELF) {
            return Calls::UNREADABLE;
        }
        let mut calls = Calls {
            prints: memchr::memmem::find(code, PRINT).is_some(),
            system_scope: with_nested(code, SystemScope::of_cubin(code)),
            ..Calls::default()
        };
        let Ok(file) = ElfFile64::<Endianness>::parse(code) else {
            return calls;
        };
        let mut budget = Budget::of_names(code);
        for symbol in file.symbols() {
            let name = symbol.name_bytes().unwrap_or_default();
            if budget.spend(name.len() as u64 + 1).is_none() {
                break;
            }
            calls.allocates |= ALLOCATE.contains(&name);
            calls.managed |= managed_image::is_managed(&symbol);
        }
        calls.allocates &= memchr::memmem::find(code, NESTED).is_none();
        calls
    }

    fn of_text(text: &[u8]) -> Calls {
        Calls {
            prints: memchr::memmem::find(text, PRINT).is_some(),
            allocates: ALLOCATE.iter().any(|name| has_word(text, name))
                && memchr::memmem::find(text, NESTED).is_none(),
            managed: memchr::memmem::find(text, managed_image::ATTRIBUTE).is_some(),
            system_scope: with_nested(text, SystemScope::of_text(text)),
        }
    }

    /// A kernel's flags for clients, `FUNCTION_*`.
    pub fn flags(&self, kernel: &[u8]) -> u32 {
        let system_scope = self.system_scope.has(kernel);
        let flag = |is: bool, flag: u32| if is { flag } else { 0 };
        flag(self.prints, FUNCTION_PRINTS) | flag(system_scope, FUNCTION_SYSTEM_SCOPE)
    }

    fn or(self, other: Calls) -> Calls {
        Calls {
            prints: self.prints || other.prints,
            allocates: self.allocates || other.allocates,
            managed: self.managed || other.managed,
            system_scope: self.system_scope.or(other.system_scope),
        }
    }
}

const PRINT: &[u8] = b"vprintf";
const ALLOCATE: [&[u8]; 2] = [b"malloc", b"free"];
/// In the names of the driver's functions for launches by kernels. An image with such launches stays in the context that
/// clients share: its load may not return in another one beside long kernels.
const NESTED: &[u8] = b"cnpv2";
/// In the names of the functions of CUDA's device runtime for launches by kernels.
const LAUNCHES: [&[u8]; 2] = [b"cudaLaunchDevice", b"cudaCDP2Launch"];

/// The kernels of some code with system-scope accesses. If its kernels launch others, any may launch those.
fn with_nested(code: &[u8], found: SystemScope) -> SystemScope {
    let launches = |name: &&[u8]| memchr::memmem::find(code, name).is_some();
    let only = |found: &SystemScope| matches!(found, SystemScope::Some(_));
    match only(&found) && LAUNCHES.iter().chain([&NESTED]).any(launches) {
        true => SystemScope::All,
        false => found,
    }
}

/// Whether a PTX text contains an identifier.
fn has_word(text: &[u8], word: &[u8]) -> bool {
    let continues = |byte: Option<&u8>| {
        byte.is_some_and(|byte| byte.is_ascii_alphanumeric() || b"_$%".contains(byte))
    };
    memchr::memmem::find_iter(text, word).any(|at| {
        let before = at.checked_sub(1).and_then(|before| text.get(before));
        !continues(before) && !continues(text.get(at + word.len()))
    })
}

/// The functions of the driver that kernels of an image may call on devices of these compute capabilities
/// (`10 * major + minor`).
pub fn calls(image: &[u8], archs: &[u32]) -> Calls {
    if image.starts_with(ELF) {
        return Calls::of_cubin(image);
    }
    let Some(entries) = entries(image) else {
        return Calls::UNREADABLE;
    };
    if entries.is_empty() {
        return Calls::of_text(image);
    }
    let mut budget = Budget::of_code(image);
    let runs = |arch: &u32| entries.iter().any(|entry| entry.fits(*arch));
    let of_entry = |entry: &Entry<'_>| match entry.kind {
        // The driver may compile a text even if a cubin fits: the client can request that.
        KIND_TEXT => match entry.content(&mut budget) {
            Some(text) if text.is_ascii() => Calls::of_text(&text),
            _ => Calls::UNREADABLE,
        },
        KIND_CUBIN if archs.iter().any(|arch| entry.fits(*arch)) => {
            let code = entry.content(&mut budget);
            code.map_or(Calls::UNREADABLE, |code| Calls::of_cubin(&code))
        }
        KIND_CUBIN => Calls::default(),
        // An intermediate language, compiled if no cubin fits.
        _ if archs.iter().all(runs) => Calls::default(),
        _ => Calls::UNREADABLE,
    };
    entries
        .iter()
        .map(of_entry)
        .fold(Calls::default(), Calls::or)
}

/// Whether code of an image that devices of these compute capabilities (`10 * major + minor`) would run contains all
/// these strings. Code that is unreadable, or exceeds the [`Budget`], counts as containing them.
pub fn holds(image: &[u8], archs: &[u32], strings: &[&[u8]]) -> bool {
    let in_text = |code: &[u8], string: &[u8]| {
        // In a text, a literal is written as a list of bytes.
        let bytes: Vec<String> = string.iter().map(u8::to_string).collect();
        memchr::memmem::find(code, bytes.join(", ").as_bytes()).is_some()
    };
    let has = |code: &[u8]| {
        strings.iter().all(|string| {
            memchr::memmem::find(code, string).is_some()
                || !code.starts_with(ELF) && in_text(code, string)
        })
    };
    if image.starts_with(ELF) {
        return has(image);
    }
    let Some(entries) = entries(image) else {
        return true;
    };
    if entries.is_empty() {
        return has(image);
    }
    let mut budget = Budget::of_code(image);
    entries.iter().any(|entry| match entry.kind {
        KIND_CUBIN if !archs.iter().any(|arch| entry.fits(*arch)) => false,
        KIND_TEXT | KIND_CUBIN => entry
            .content(&mut budget)
            .is_none_or(|code| !(code.starts_with(ELF) || code.is_ascii()) || has(&code)),
        _ => true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KERNEL: &str = ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry k(.param .u64 .ptr .global .align 4 p)\n{ ld.global.u32 %r1, [%rd1]; cvta.to.global.u64 %rd1, %rd2; ret; }\n";

    /// A variable, and code that writes it.
    const WRITTEN: &str = ".global .u32 counter;\n.func f() { st.global.u32 [counter], 1; }";

    fn text(declaration: &str) -> bool {
        let image = format!("{declaration}\n{KERNEL}\0");
        keeps_nothing(image.as_bytes(), 90)
    }

    #[test]
    fn text_with_variables_keeps_something() {
        assert!(text(""));
        assert!(text(".const .align 4 .b8 table[16];"));
        assert!(text(
            ".global .align 1 .b8 $str[6] = {105, 32, 62, 32, 48, 0};"
        ));
        assert!(text(
            ".global .align 1 .b8 _ZN33_INTERNAL_89b8bf71_4_t_cu4cuda3std3__45__cpo5beginE[1];"
        ));
        let object = "_ZN33_INTERNAL_89b8bf71_4_t_cu4cuda3std3__45__cpo5beginE";
        for (declaration, name) in [
            (&*format!(".global .align 1 .b8 {object}[2];"), object),
            (".visible .global .align 4 .u32 counter;", "counter"),
            (".global .align 4 .u32 counter = 5;", "counter"),
            (
                ".shared .b32 s;\t.global .align 4 .b8 buffer[400];",
                "buffer",
            ),
        ] {
            let with = |code: &str| text(&format!("{declaration}\n.func f() {{ {code} }}"));
            assert!(!with(&format!("st.global.u32 [{name}], 1;")));
            assert!(with(&format!("ld.global.u32 %r1, [{name}];")) && with(""));
        }
        // Longer texts are not examined.
        let long = format!(".global .u32 counter;\n//{}\n", " ".repeat(1 << 20));
        assert!(!text(&long));
        assert!(!text(".global"));
    }

    #[test]
    fn code_that_leaves_something_behind_stays_where_it_is() {
        let (variables, addresses) = (
            Leaves {
                variables: true,
                ..Leaves::default()
            },
            Leaves {
                addresses: true,
                ..Leaves::default()
            },
        );
        for (word, expected) in [
            ("", Leaves::default()),
            (
                ".extern .func (.param .b64 r) malloc (.param .b64 n);",
                addresses,
            ),
            (
                ".global .align 1 .b8 $str[6] = {1}; // cvta.global.u64 %rd1, $str",
                Leaves::default(),
            ),
            (
                "prototype_0 : .callprototype (.param .b32 _) _ (.param .b32 _);",
                addresses,
            ),
            (WRITTEN, variables),
            (".global .u32 counter;", Leaves::default()),
        ] {
            let image = format!("{word}\n{KERNEL}");
            assert_eq!(leaves(image.as_bytes(), 90), expected, "{word}");
        }
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert_ne!(leaves(&own, 90), Leaves::default());
    }

    #[test]
    fn variables_that_no_kernel_uses_keep_nothing() {
        macro_rules! fixture {
            ($name:literal) => {
                (
                    $name,
                    &include_bytes!(concat!("../../../../tests/fixtures/variables/", $name))[..],
                )
            };
        }
        for (name, code) in [
            fixture!("unreferenced.sm_75.cubin"),
            fixture!("unreferenced.sm_90.cubin"),
            fixture!("unused.sm_75.cubin"),
            fixture!("unused.sm_90.cubin"),
        ] {
            assert!(keeps_nothing(code, 90), "{name}");
        }
        for (name, code) in [
            fixture!("referenced.sm_75.cubin"),
            fixture!("referenced.sm_90.cubin"),
            fixture!("referenced.linked.cubin"),
            fixture!("function.sm_75.cubin"),
            fixture!("function.sm_90.cubin"),
            fixture!("function.linked.cubin"),
        ] {
            assert!(!keeps_nothing(code, 90), "{name}");
        }
    }

    /// A fatbin with one entry of text.
    fn fatbin(text: &[u8], flags: u64, whole: usize, kind: u16, arch: u32) -> Vec<u8> {
        let size = text.len().next_multiple_of(8);
        let mut bytes = vec![0; 16 + 64];
        bytes[..4].copy_from_slice(&FATBIN);
        bytes[6..8].copy_from_slice(&16u16.to_le_bytes());
        bytes[8..16].copy_from_slice(&(64 + size as u64).to_le_bytes());
        let entry = &mut bytes[16..];
        entry[..2].copy_from_slice(&kind.to_le_bytes());
        entry[4..8].copy_from_slice(&64u32.to_le_bytes());
        entry[8..16].copy_from_slice(&(size as u64).to_le_bytes());
        entry[16..20].copy_from_slice(&(text.len() as u32).to_le_bytes());
        entry[28..32].copy_from_slice(&arch.to_le_bytes());
        entry[40..48].copy_from_slice(&flags.to_le_bytes());
        entry[56..64].copy_from_slice(&(whole as u64).to_le_bytes());
        bytes.extend_from_slice(text);
        bytes.resize(16 + 64 + size, 0);
        bytes
    }

    #[test]
    fn strings_are_found_in_code() {
        let literal = format!(".global .align 1 .b8 $str[4] = {{118, 32, 60, 0}};\n{KERNEL}");
        assert!(holds(literal.as_bytes(), &[90], &[b"v <"]));
        assert!(!holds(literal.as_bytes(), &[90], &[b"v <", b"v >"]));
        let packed = lz4_flex::block::compress(literal.as_bytes());
        let image = fatbin(&packed, LZ4, literal.len(), KIND_TEXT, 75);
        assert!(holds(&image, &[90], &[b"v <"]) && !holds(&image, &[90], &[b"v >"]));
        let broken = fatbin(&packed, LZ4, literal.len() + 1, KIND_TEXT, 75);
        assert!(holds(&broken, &[90], &[b"v >"]), "it cannot be read");
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert!(holds(&own, &[90], &[b"strings_are_found_in_code"]));
    }

    #[test]
    fn compressed_text_is_read() {
        let (good, bad) = (KERNEL.to_string(), format!("{WRITTEN}\n{KERNEL}"));
        for (text, expected) in [(good, true), (bad, false)] {
            let packed = lz4_flex::block::compress(text.as_bytes());
            let image = fatbin(&packed, LZ4, text.len(), KIND_TEXT, 75);
            assert_eq!(keeps_nothing(&image, 90), expected);
            // The size differs from the declared one.
            assert!(!keeps_nothing(
                &fatbin(&packed, LZ4, text.len() + 1, KIND_TEXT, 75),
                90
            ));
            let zstd = ruzstd::encoding::compress_to_vec(
                text.as_bytes(),
                ruzstd::encoding::CompressionLevel::Fastest,
            );
            let image = fatbin(&zstd, ZSTD, text.len(), KIND_TEXT, 75);
            assert_eq!(keeps_nothing(&image, 90), expected);
            assert!(!keeps_nothing(
                &fatbin(&zstd, ZSTD, text.len() - 1, KIND_TEXT, 75),
                90
            ));
            let image = fatbin(text.as_bytes(), 0, 0, KIND_TEXT, 75);
            assert_eq!(keeps_nothing(&image, 90), expected);
        }
    }

    fn prints(image: &[u8], archs: &[u32]) -> bool {
        calls(image, archs).prints
    }

    #[test]
    fn a_text_allocates_if_it_names_the_function() {
        for (text, expected) in [
            ("call.uni (retval0), malloc, (param0);", true),
            (".extern .func free(.param .b64 a);", true),
            ("call.uni (retval0), my_malloc, (param0);", false),
            ("call.uni mallocated, (param0);", false),
            ("bra $free;", false),
            ("", false),
        ] {
            let text = format!("{KERNEL}{text}\n");
            let lz4 = lz4_flex::block::compress(text.as_bytes());
            let fits = fatbin(&lz4, LZ4, text.len(), KIND_TEXT, 75);
            for image in [text.as_bytes(), &fits] {
                assert_eq!(calls(image, &[90]).allocates, expected, "{text}");
            }
        }
    }

    #[test]
    fn a_cubin_allocates_if_it_has_the_functions_symbol() {
        for (name, expected) in [
            ("malloc", true),
            ("free", true),
            ("_Z6mallocv", false),
            ("freely", false),
        ] {
            let code = with_symbol(name);
            let lz4 = lz4_flex::block::compress(&code);
            let fits = |arch| fatbin(&lz4, LZ4, code.len(), KIND_CUBIN, arch);
            assert_eq!(calls(&code, &[90]).allocates, expected, "{name}");
            assert_eq!(calls(&fits(90), &[90]).allocates, expected, "{name}");
            assert!(!calls(&fits(80), &[90]).allocates, "no device runs it");
        }
        let unreadable = [ELF, b"malloc", &[0; 100]].concat();
        assert!(!calls(&unreadable, &[90]).allocates);
    }

    /// An ELF file of a GPU with one undefined symbol.
    fn with_symbol(name: &str) -> Vec<u8> {
        /// Bytes of the header, of a section's header and of a symbol.
        const SIZES: [u64; 3] = [64, 64, 24];
        const TABLES: [u64; 2] = [3, 2];
        let strings = [b"\0", name.as_bytes(), b"\0"].concat();
        let begins = [64, 64 + strings.len() as u64];
        let sections = begins[1] + 2 * SIZES[2];
        let section = |at: usize, bytes: u64, link: u64, entry: u64| {
            let kind = TABLES[at] << 32;
            [kind, 0, 0, begins[at], bytes, link | link << 32, 1, entry]
        };
        let bytes = |words: &[u64]| -> Vec<u8> {
            let bytes = words.iter().flat_map(|word| word.to_le_bytes());
            bytes.collect()
        };
        let header = [
            0x0001_0102_464c_457f,
            0,
            1 | u64::from(EM_CUDA) << 16 | 1 << 32,
            0,
            0,
            sections,
            SIZES[0] << 32,
            SIZES[1] << 16 | 3 << 32 | 1 << 48,
        ];
        [
            bytes(&header),
            strings.clone(),
            bytes(&[0, 0, 0, 1, 0, 0]),
            bytes(&[0; 8]),
            bytes(&section(0, strings.len() as u64, 0, 0)),
            bytes(&section(1, 2 * SIZES[2], 1, SIZES[2])),
        ]
        .concat()
    }

    #[test]
    fn printing_code_is_found_however_it_is_packed() {
        // The name is preceded by parts of itself, so that the compressed code does not contain it verbatim.
        const NAME: &str = "vpri_ vprin_ rintf vprintf";
        let text = format!("{}// {NAME} {NAME}\n", KERNEL.repeat(9));
        let code = [ELF, NAME.as_bytes(), &[0; 600]].concat();
        for (kind, printing) in [(KIND_TEXT, text.as_bytes()), (KIND_CUBIN, &code)] {
            let quiet = String::from_utf8(printing.to_vec()).expect("UTF-8");
            let quiet = quiet.replace("vprintf", "vanished");
            for (content, expected) in [(printing, true), (quiet.as_bytes(), false)] {
                let lz4 = lz4_flex::block::compress(content);
                let level = ruzstd::encoding::CompressionLevel::Fastest;
                let zstd = ruzstd::encoding::compress_to_vec(content, level);
                for (packed, flags) in [(&content.to_vec(), 0), (&lz4, LZ4), (&zstd, ZSTD)] {
                    let whole = if flags == 0 { 0 } else { content.len() };
                    let plain = memchr::memmem::find(packed, b"vprintf").is_some();
                    assert_eq!(plain, expected && flags == 0);
                    let image = fatbin(packed, flags, whole, kind, 80);
                    assert_eq!(prints(&image, &[86]), expected, "{kind} {flags:#x}");
                    let behind = [fatbin(KERNEL.as_bytes(), 0, 0, KIND_TEXT, 75), image].concat();
                    assert_eq!(prints(&behind, &[100, 86]), expected, "{kind} {flags:#x}");
                }
                // Code that no device runs does not count, however it is packed.
                let other = fatbin(&lz4, LZ4, content.len(), KIND_CUBIN, 80);
                if kind == KIND_CUBIN {
                    assert!(!prints(&other, &[90, 75]));
                }
            }
        }
        assert!(!prints(KERNEL.as_bytes(), &[90]));
        assert!(!prints(&[ELF, &[0; 100]].concat(), &[90]));
    }

    #[test]
    fn code_that_cannot_be_read_counts_as_printing() {
        let lz4 = lz4_flex::block::compress(KERNEL.as_bytes());
        let packed = |flags, whole, kind| fatbin(&lz4, flags, whole, kind, 75);
        assert!(!prints(&packed(LZ4, KERNEL.len(), KIND_TEXT), &[75]));
        for unreadable in [
            // The size or the compression differs from the declared one.
            packed(LZ4, KERNEL.len() - 1, KIND_TEXT),
            packed(ZSTD, KERNEL.len(), KIND_TEXT),
            packed(0x1000, KERNEL.len(), KIND_CUBIN),
            packed(LZ4, 1 << 40, KIND_CUBIN),
            // An unknown kind.
            packed(LZ4, KERNEL.len(), 0x10),
            fatbin(KERNEL.as_bytes(), 0, 0, KIND_TEXT, 75)[..120].to_vec(),
        ] {
            assert!(prints(&unreadable, &[75]));
        }
        // Exceeds the budget.
        let whole = vec![b' '; 16 << 20];
        let bomb = fatbin(
            &lz4_flex::block::compress(&whole),
            LZ4,
            whole.len(),
            KIND_TEXT,
            75,
        );
        assert!(!prints(&bomb, &[75]));
        let entries = 6 + 64 * bomb.len() * 6 / whole.len();
        assert!(prints(&bomb.repeat(entries), &[75]));
    }

    #[test]
    fn code_for_this_device_comes_before_text() {
        // The content is no valid cubin and so cannot be analyzed; for another device it does not count.
        let mut image = fatbin(KERNEL.as_bytes(), 0, 0, KIND_TEXT, 75);
        image.extend(fatbin(b"junk", 0, 0, KIND_CUBIN, 80));
        assert!(keeps_nothing(&image, 90));
        assert!(!keeps_nothing(&image, 86));
        assert!(keeps_nothing(&image, 75));
    }

    #[test]
    fn a_file_that_is_no_cubin_is_not_shared() {
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert!(!keeps_nothing(&own, 90));
    }

    /// Number of bytes scanned to analyze an image.
    fn work_of(image: &[u8]) -> usize {
        work::BYTES.set(0);
        keeps_nothing(image, 90);
        work::BYTES.get()
    }

    #[test]
    fn an_entry_or_a_fatbin_without_length_ends_the_scan() {
        let good = fatbin(KERNEL.as_bytes(), 0, 0, KIND_TEXT, 75);
        let empty_entry = {
            let mut bytes = fatbin(b"", 0, 0, KIND_TEXT, 75);
            bytes[16 + 4..16 + 16].fill(0);
            bytes
        };
        let empty_fatbin = {
            let mut bytes = vec![0; HEADER];
            bytes[..4].copy_from_slice(&FATBIN);
            bytes
        };
        for end in [empty_entry, empty_fatbin] {
            assert!(!keeps_nothing(&end, 90));
            assert!(!keeps_nothing(&[good.clone(), end].concat(), 90));
        }
    }

    #[test]
    fn declarations_within_another_are_not_read_again() {
        let repeated = |count: usize| {
            let comment = "// .global".to_string() + &" .global".repeat(count);
            format!("{comment} .b8 $str[4];\n{KERNEL}\0").into_bytes()
        };
        let image = repeated(1 << 17);
        assert!(keeps_nothing(&image, 90));
        assert!(work_of(&image) <= 2 * image.len(), "{}", work_of(&image));
        let hidden = format!("// {}\n{WRITTEN}\n{KERNEL}", ".global ".repeat(9));
        assert!(!keeps_nothing(hidden.as_bytes(), 90));
    }

    const NOTHING: Leaves = Leaves {
        variables: false,
        addresses: false,
    };
    const VARIABLES: Leaves = Leaves {
        variables: true,
        addresses: false,
    };
    const ADDRESSES: Leaves = Leaves {
        variables: false,
        addresses: true,
    };

    /// `cudaGraphSetConditional` is a function of the driver's, as `malloc` is.
    #[test]
    fn kernels_that_set_values_of_conditional_nodes_store_no_addresses() {
        let sets = include_bytes!("../../../../tests/fixtures/variables/condition.sm_90.cubin");
        assert_eq!(leaves(sets, 90), VARIABLES);
        let allocates =
            include_bytes!("../../../../tests/fixtures/variables/allocating.sm_90.cubin");
        assert!(leaves(allocates, 90).addresses);
    }

    #[test]
    fn linked_code_that_takes_the_address_of_a_function_may_store_it() {
        macro_rules! fixture {
            ($name:literal) => {
                include_bytes!(concat!("../../../../tests/fixtures/variables/", $name))
            };
        }
        let [calls_75, calls_90] = [
            &fixture!("calling.sm_75.cubin")[..],
            &fixture!("calling.sm_90.cubin")[..],
        ];
        let [takes_75, takes_90] = [
            &fixture!("taking.sm_75.cubin")[..],
            &fixture!("taking.sm_90.cubin")[..],
        ];
        for (arch, calls, takes) in [(75, calls_75, takes_75), (90, calls_90, takes_90)] {
            assert_eq!(leaves(calls, arch), NOTHING, "{arch}");
            assert_eq!(leaves(takes, arch), ADDRESSES, "{arch}");
        }
    }

    #[test]
    fn variables_and_addresses_are_told_apart() {
        let of = |words: &str| leaves(format!("{words}\n{KERNEL}").as_bytes(), 90);
        assert_eq!(of(""), NOTHING);
        assert_eq!(of(".const .align 4 .b8 table[16];"), NOTHING);
        assert_eq!(of(WRITTEN), VARIABLES);
        let call = "prototype_0 : .callprototype (.param .b32 _) _ (.param .b32 _);";
        assert_eq!(of(call), ADDRESSES);
        let both = Leaves {
            variables: true,
            addresses: true,
        };
        assert_eq!(of(&format!("{WRITTEN}\n{call}")), both);
        // Unreadable code counts as leaving everything.
        assert_eq!(leaves(b"\x7fELF but none", 90), both);
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert_eq!(leaves(&own, 90), both);
    }

    /// As in cuBLAS, whose cubins have a section table at an odd offset.
    #[test]
    fn sections_may_be_at_any_offset() {
        for table in 64..72 {
            let mut image = vec![0; table + 2 * 64];
            image[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
            image[18..20].copy_from_slice(&190u16.to_le_bytes());
            image[40..48].copy_from_slice(&(table as u64).to_le_bytes());
            for (at, field) in [(52, 64), (58, 64), (60, 2), (62, 1u16)] {
                image[at..at + 2].copy_from_slice(&field.to_le_bytes());
            }
            image[table + 64 + 4] = 3;
            assert_eq!(leaves(&image, 90), NOTHING, "{table}");
            // A writable section without symbols.
            let mut kept = image.clone();
            kept.splice(40..48, (table as u64 + 16).to_le_bytes());
            kept.splice(table..table, *b"\0.nv.global\0\0\0\0\0");
            let section = table + 16 + 64;
            kept[section] = 1;
            kept[section + 24..section + 32].copy_from_slice(&(table as u64).to_le_bytes());
            kept[section + 32..section + 40].copy_from_slice(&12u64.to_le_bytes());
            assert_eq!(leaves(&kept, 90), VARIABLES, "{table}");
        }
    }

    #[test]
    fn names_that_overlap_are_not_read_without_bound() {
        const SECTIONS: usize = 2000;
        // One name of 64 KiB shared by all sections.
        let names = [vec![b'x'; 64 << 10], vec![0]].concat();
        let table = 64 + names.len().next_multiple_of(8);
        let mut image = vec![0; table + SECTIONS * 64];
        image[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
        image[18..20].copy_from_slice(&190u16.to_le_bytes());
        image[40..48].copy_from_slice(&(table as u64).to_le_bytes());
        for (at, field) in [(52, 64), (58, 64), (60, SECTIONS as u16), (62, 1u16)] {
            image[at..at + 2].copy_from_slice(&field.to_le_bytes());
        }
        image[64..64 + names.len()].copy_from_slice(&names);
        for section in 1..SECTIONS {
            let at = table + section * 64;
            image[at + 4..at + 8].copy_from_slice(&3u32.to_le_bytes());
            image[at + 24..at + 32].copy_from_slice(&64u64.to_le_bytes());
            image[at + 32..at + 40].copy_from_slice(&(names.len() as u64).to_le_bytes());
        }
        assert!(
            work_of(&image) >= 3 * image.len(),
            "the names are read at all"
        );
        assert!(work_of(&image) <= 5 * image.len(), "{}", work_of(&image));
    }

    #[test]
    fn many_small_bombs_are_not_all_unpacked() {
        let whole = vec![b' '; 16 << 20];
        let packed = lz4_flex::block::compress(&whole);
        let bomb = fatbin(&packed, LZ4, whole.len(), KIND_TEXT, 75);
        assert!(keeps_nothing(&bomb, 90));
        let mut budget = Budget::of_code(&bomb);
        let entry = &entries(&bomb).unwrap()[0];
        let unpacked = (0..1000).take_while(|_| entry.content(&mut budget).is_some());
        assert!(unpacked.count() <= 4 + 64 * bomb.len() / whole.len());
    }

    proptest! {
        #[test]
        fn mutated_fatbins_are_judged_in_linear_time(
            parts in prop::collection::vec((0..3u8, 0..3u16, 0..200usize), 1..6),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..12),
            zeroed in prop::collection::vec((any::<prop::sample::Index>(), 0..17usize), 0..3),
        ) {
            let mut image = Vec::new();
            for (packing, kind, len) in parts {
                let text = [KERNEL.as_bytes(), &vec![b'\n'; len]].concat();
                let packed = match packing {
                    0 => fatbin(&text, 0, 0, kind, 75),
                    1 => fatbin(&lz4_flex::block::compress(&text), LZ4, text.len(), kind, 75),
                    _ => fatbin(&text, ZSTD, text.len(), kind, 75),
                };
                image.extend(packed);
            }
            for (at, len) in zeroed {
                let at = at.index(image.len());
                let end = (at + len).min(image.len());
                image[at..end].fill(0);
            }
            for (at, byte) in changes {
                let at = at.index(image.len());
                image[at] = byte;
            }
            // Texts are unpacked from the image and scanned once each.
            let unpacked = 6 * (KERNEL.len() + 200);
            let work = work_of(&image);
            prop_assert!(work <= 8 * (image.len() + unpacked), "{work} of {}", image.len());
        }

        #[test]
        fn nothing_panics(mut bytes in prop::collection::vec(any::<u8>(), 0..600), magic in 0..3, len in 0u64..600) {
            let head = fatbin(b"", LZ4 | ZSTD, 100, KIND_TEXT, 75);
            let start: &[u8] = match magic { 0 => b"\x7fELF\x02\x01\x01", 1 => &head, _ => b"" };
            let n = start.len().min(bytes.len());
            bytes[..n].copy_from_slice(&start[..n]);
            if magic == 1 && bytes.len() >= 40 {
                bytes[8..16].copy_from_slice(&len.to_le_bytes());
            }
            keeps_nothing(&bytes, 90);
        }
    }
}
