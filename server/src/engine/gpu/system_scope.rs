//! Which kernels of an image may access global or generic memory with system scope: volatile accesses, loads, stores,
//! atomic operations and fences of scope `sys`, and accesses as to devices (`mmio`).
//!
//! NVIDIA does not document the encoding of instructions. The opcodes and fields here are those of code that ptxas 12.4
//! and 13.0 made for compute capability 7.0 to 12.0, and that nvdisasm 13.5 names so.

use crate::engine::gpu::cubin::{Budget, EM_CUDA};
use object::read::elf::{ElfFile64, FileHeader};
use object::{
    Endianness, Object, ObjectSection, ObjectSymbol, RelocationTarget, SectionIndex, SectionKind,
    SymbolFlags,
};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// Kernels with such accesses.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum SystemScope {
    #[default]
    None,
    /// The hashes of their names, sorted. A kernel whose name has the same hash counts too.
    Some(Arc<[u64]>),
    /// All kernels: a function that any of them may call has such accesses, or the code cannot be read.
    All,
}

impl SystemScope {
    /// Whether a kernel is one of them. The NUL behind its name may be left out.
    pub fn has(&self, kernel: &[u8]) -> bool {
        let kernel = kernel.strip_suffix(b"\0").unwrap_or(kernel);
        match self {
            SystemScope::None => false,
            SystemScope::Some(known) => known.binary_search(&hash_of(kernel)).is_ok(),
            SystemScope::All => true,
        }
    }

    /// The kernels of both.
    pub fn or(self, other: SystemScope) -> SystemScope {
        match (self, other) {
            (SystemScope::All, _) | (_, SystemScope::All) => SystemScope::All,
            (SystemScope::None, one) | (one, SystemScope::None) => one,
            (SystemScope::Some(one), SystemScope::Some(other)) => {
                SystemScope::of_hashes(one.iter().chain(&*other).copied().collect())
            }
        }
    }

    fn of_hashes(mut hashes: Vec<u64>) -> SystemScope {
        hashes.sort_unstable();
        hashes.dedup();
        match hashes.is_empty() {
            true => SystemScope::None,
            false => SystemScope::Some(hashes.into()),
        }
    }

    /// The kernels of a cubin. All, if it is for an unknown architecture, one before compute capability 7.0, or exceeds
    /// the [`Budget`].
    pub fn of_cubin(code: &[u8]) -> SystemScope {
        let Ok(file) = ElfFile64::<Endianness>::parse(code) else {
            return SystemScope::All;
        };
        let budget = Budget::of_names(code);
        in_file(&file, budget).map_or(SystemScope::All, SystemScope::of_hashes)
    }

    /// The kernels of a PTX text. All, if a function in it has such accesses.
    pub fn of_text(text: &[u8]) -> SystemScope {
        // Every text has this directive.
        if memchr::memmem::find(text, b".version").is_none() {
            return SystemScope::All;
        }
        let any = MODIFIERS
            .iter()
            .any(|one| memchr::memmem::find(text, one).is_some());
        match any {
            true => in_text(text).map_or(SystemScope::All, SystemScope::of_hashes),
            false => SystemScope::None,
        }
    }
}

fn hash_of(kernel: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    kernel.hash(&mut hasher);
    hasher.finish()
}

/// Whether a kernel has volatile accesses only to memory in which its blocks exchange values: CUB's radix sort.
fn has_private_only(kernel: &[u8]) -> bool {
    const SORT: &[u8] = b"29DeviceRadixSortOnesweepKernel";
    kernel.starts_with(b"_ZN") && memchr::memmem::find(kernel, SORT).is_some()
}

/// `EI_OSABI` of cubins of CUDA 13, and of those before it.
const ABI: u8 = 0x41;
const OLDER_ABI: u8 = 0x33;
/// Bit of `st_other` of a kernel's symbol.
const KERNEL: u8 = 0x10;

/// The compute capability, `10 * major + minor`, that a cubin is for.
pub fn arch_of(file: &ElfFile64<'_, Endianness>) -> Option<u32> {
    let (header, endian) = (file.elf_header(), file.endian());
    if header.e_machine(endian) != EM_CUDA {
        return None;
    }
    let flags = header.e_flags(endian);
    match header.e_ident().os_abi {
        ABI => Some(flags >> 8 & 0xff),
        OLDER_ABI => Some(flags & 0xff),
        _ => None,
    }
}

/// A section of code: one kernel or function.
#[derive(Default)]
struct Part {
    /// It has such accesses.
    has: bool,
    /// Functions that it calls have such accesses.
    calls: bool,
    is_kernel: bool,
    /// The sections that refer to it.
    callers: Vec<SectionIndex>,
    /// Its address is in data, where any kernel may read it.
    is_known: bool,
}

/// Hashes of the kernels' names; `None` for all kernels.
fn in_file(file: &ElfFile64<'_, Endianness>, mut budget: Budget) -> Option<Vec<u64>> {
    let arch = arch_of(file).filter(|arch| *arch >= 70)?;
    let mut parts: HashMap<SectionIndex, Part> = HashMap::new();
    for section in file.sections() {
        let name = section.name_bytes().unwrap_or_default();
        budget.spend(name.len() as u64 + 1)?;
        if !name.starts_with(b".text") && section.kind() != SectionKind::Text {
            continue;
        }
        // Sections may overlap.
        let code = section.data().ok()?;
        budget.spend(code.len() as u64)?;
        let part = Part {
            has: in_code(code, arch),
            ..Part::default()
        };
        parts.insert(section.index(), part);
    }
    let mut kernels = Vec::new();
    for symbol in file.symbols() {
        budget.spend(1)?;
        let SymbolFlags::Elf {
            st_info, st_other, ..
        } = symbol.flags()
        else {
            continue;
        };
        let is_kernel = st_info & 0xf == object::elf::STT_FUNC && st_other & KERNEL != 0;
        let Some(section) = symbol.section_index().filter(|_| is_kernel) else {
            continue;
        };
        // A kernel elsewhere has code of an unknown kind.
        parts.get_mut(&section)?.is_kernel = true;
        let name = symbol.name_bytes().ok()?;
        budget.spend(name.len() as u64)?;
        kernels.push((name, section));
    }
    let functions = parts.iter().filter(|(_, part)| part.has && !part.is_kernel);
    let mut left: Vec<SectionIndex> = functions.map(|(section, _)| *section).collect();
    if !left.is_empty() {
        find_callers(file, &mut parts, &mut budget)?;
    }
    // From the functions with such accesses to their callers.
    while let Some(section) = left.pop() {
        let part = parts.get_mut(&section)?;
        if part.is_known || part.callers.is_empty() {
            return None;
        }
        for caller in std::mem::take(&mut part.callers) {
            let caller_part = parts.get_mut(&caller)?;
            let is_new = !caller_part.calls && !caller_part.has;
            caller_part.calls = true;
            if is_new && !caller_part.is_kernel {
                left.push(caller);
            }
        }
    }
    let found = kernels.into_iter().filter(|(name, section)| {
        let part = &parts[section];
        part.calls || part.has && !has_private_only(name)
    });
    Some(found.map(|(name, _)| hash_of(name)).collect())
}

/// Finds the references to functions: relocations of code, and of data that is not for debuggers.
fn find_callers(
    file: &ElfFile64<'_, Endianness>,
    parts: &mut HashMap<SectionIndex, Part>,
    budget: &mut Budget,
) -> Option<()> {
    /// Charged for a relocation, bytes.
    const RELOCATION: u64 = 16;
    const DEBUG: [&[u8]; 3] = [b".debug", b".nv_debug", b".nv.merc"];
    for section in file.sections() {
        let name = section.name_bytes().unwrap_or_default();
        budget.spend(name.len() as u64 + 1)?;
        if DEBUG.iter().any(|start| name.starts_with(start)) {
            continue;
        }
        let (from, is_code) = (section.index(), parts.contains_key(&section.index()));
        for (_, relocation) in section.relocations() {
            budget.spend(RELOCATION)?;
            let to = match relocation.target() {
                RelocationTarget::Symbol(index) => {
                    file.symbol_by_index(index).ok()?.section_index()
                }
                RelocationTarget::Section(index) => Some(index),
                _ => None,
            };
            let Some(part) = to.and_then(|to| parts.get_mut(&to)) else {
                continue;
            };
            if !is_code {
                part.is_known = true;
            } else if to != Some(from) && part.callers.last() != Some(&from) {
                part.callers.push(from);
            }
        }
    }
    Some(())
}

/// Whether there are such accesses in code.
fn in_code(code: &[u8], arch: u32) -> bool {
    let (words, rest) = code.as_chunks::<16>();
    let is = match arch {
        80.. => |word: &[u8; 16]| is_system_scope(u128::from_le_bytes(*word), true),
        _ => |word: &[u8; 16]| is_system_scope(u128::from_le_bytes(*word), false),
    };
    !rest.is_empty() || words.iter().any(is)
}

/// Whether an instruction is such an access. `is_80` says whether it is for compute capability 8.0 or later.
#[inline]
fn is_system_scope(word: u128, is_80: bool) -> bool {
    const fn set(members: &[u16]) -> u16 {
        let (mut set, mut at) = (0, 0);
        while at < members.len() {
            set |= 1 << members[at];
            at += 1;
        }
        set
    }
    /// The orders of accesses that other devices and the host need not see: of 8.0 and later, weak (0), constant (1 to
    /// 4, 9, 11, 15), or strong in a block (5) or a device (6, 7). The others are strong in the system (10), `mmio` (8, 12)
    /// and unknown (13, 14).
    const NARROW: u16 = set(&[0, 1, 2, 3, 4, 5, 6, 7, 9, 11, 15]);
    /// Of 7.x, the first order that is none of those: strong in the system. Scopes are in the lower two bits (3 is the
    /// system), orders in the upper (constant, weak, strong, `mmio`); weak accesses have the scope of the system.
    const STRONG_SYSTEM_70: u16 = 11;
    let field = |at: u32| (word >> at) as u16 & 0xf;
    // The opcode without the bits for the kinds of the operands.
    match word as u16 & 0x1ff {
        // MEMBAR, of which the scope is a block (0, 6), a multiprocessor (1), a device (2), or `VC` (5), which code for
        // debuggers has before it ends.
        0x192 => !matches!(field(76) & 7, 0 | 1 | 2 | 5 | 6),
        // LD, LDG, ST, STG; ATOM, ATOM.CAS, RED; ATOMG, ATOMG.CAS
        0x180 | 0x181 | 0x185 | 0x186 | 0x18a | 0x18b | 0x18e | 0x1a8 | 0x1a9 => match is_80 {
            true => NARROW >> field(77) & 1 == 0,
            false => field(77) >= STRONG_SYSTEM_70,
        },
        // USTGR, UREDGR; LDG and STG of 256 bits; ATOM, ATOMG, LDGMC (twice) and REDG of further types; UBLKCP, UBLKRED
        0x177 | 0x178 | 0x17e | 0x17f | 0x1a2..=0x1a6 | 0x1ba | 0x1bb if is_80 => {
            NARROW >> field(77) & 1 == 0
        }
        _ => false,
    }
}

/// Parts of instructions that make them such accesses. Caching modifiers are of `ld` and `st`.
const MODIFIERS: [&[u8]; 5] = [b".sys", b".volatile", b".mmio", b".cv", b".wt"];

/// Hashes of the kernels' names; `None` for all kernels.
fn in_text(text: &[u8]) -> Option<Vec<u64>> {
    enum Place<'a> {
        Outside,
        /// After `.entry`.
        Begins,
        Kernel(&'a [u8]),
        Function,
    }
    let mut place = Place::Outside;
    let mut found = Vec::new();
    for word in words(text) {
        match (word, &place) {
            (b".entry", _) => place = Place::Begins,
            (b".func", _) => place = Place::Function,
            (name, Place::Begins) => place = Place::Kernel(name),
            (word, place) if is_system_scope_text(word) => match place {
                Place::Kernel(name) if has_private_only(name) => {}
                Place::Kernel(name) => found.push(hash_of(name)),
                _ => return None,
            },
            _ => {}
        }
    }
    found.dedup();
    Some(found)
}

/// Whether an instruction, with its modifiers, is such an access.
fn is_system_scope_text(word: &[u8]) -> bool {
    let mut parts = word.split(|byte| *byte == b'.');
    let name = parts.next().unwrap_or_default();
    if !name.first().is_some_and(u8::is_ascii_lowercase) {
        return false;
    }
    let is_cached = matches!(name, b"ld" | b"st");
    let (mut is_wide, mut is_global, mut is_own) = (false, false, false);
    for part in parts {
        is_wide |= matches!(part, b"sys" | b"volatile" | b"mmio")
            || is_cached && matches!(part, b"cv" | b"wt");
        is_global |= part == b"global";
        is_own |= part.starts_with(b"shared") || matches!(part, b"local" | b"const" | b"param");
    }
    is_wide && (is_global || !is_own)
}

/// The words of a text: identifiers, numbers, directives, and instructions with their modifiers. Comments and strings
/// are left out.
fn words(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || b"._$%".contains(byte);
    let mut rest = text;
    std::iter::from_fn(move || {
        loop {
            let skipped = match rest {
                [] => return None,
                [b'/', b'/', ..] => memchr::memchr(b'\n', rest).unwrap_or(rest.len()),
                [b'/', b'*', behind @ ..] => {
                    memchr::memmem::find(behind, b"*/").map_or(rest.len(), |end| end + 4)
                }
                // A string ends in its line at the latest.
                [b'"', behind @ ..] => {
                    memchr::memchr2(b'"', b'\n', behind).map_or(rest.len(), |end| end + 2)
                }
                [first, ..] if is_part(first) => {
                    let mut end = 0;
                    loop {
                        let more = &rest[end..];
                        end += more.iter().take_while(|byte| is_part(byte)).count();
                        // As in `shared::cta`.
                        match &rest[end..] {
                            [b':', b':', next, ..] if is_part(next) => end += 2,
                            _ => break,
                        }
                    }
                    let (word, behind) = rest.split_at(end);
                    rest = behind;
                    return Some(word);
                }
                _ => 1,
            };
            rest = &rest[skipped..];
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::gpu::cubin::calls;
    use mpsshim_proto::message::FUNCTION_SYSTEM_SCOPE;
    use proptest::prelude::*;

    macro_rules! fixture {
        ($name:literal) => {
            include_bytes!(concat!("../../../../tests/fixtures/", $name))
        };
    }
    const CUBIN: &[u8] = fixture!("system_scope/accesses.sm_90.cubin");
    const OLDER: &[u8] = fixture!("system_scope/accesses.sm_75.cubin");
    const TEXT: &[u8] = fixture!("system_scope/accesses.ptx");
    const FUNCTION: &[u8] = fixture!("system_scope/function.sm_90.cubin");
    const LINKED: &[u8] = fixture!("system_scope/linked.sm_90.cubin");
    const DEBUG: &[u8] = fixture!("managed/variables.debug.cubin");
    const NESTED: &[u8] = fixture!("nested.fatbin");

    const WIDE: [&str; 3] = ["y_atomic", "y_fence", "y_volatile"];
    const NARROW: [&str; 2] = ["n_device", "n_plain"];

    fn has(image: &[u8], kernel: &str) -> bool {
        let calls = calls(image, &[90]);
        let of = |name: &[u8]| calls.flags(name) & FUNCTION_SYSTEM_SCOPE != 0;
        let plain = of(kernel.as_bytes());
        assert_eq!(of(format!("{kernel}\0").as_bytes()), plain);
        plain
    }

    #[test]
    fn kernels_of_compiled_images_are_told_apart() {
        for image in [CUBIN, OLDER, TEXT] {
            assert!(WIDE.iter().all(|name| has(image, name)));
            assert!(!NARROW.iter().any(|name| has(image, name)));
            assert!(!has(image, "unknown"));
        }
        // Fences before the end of code for debuggers do not count.
        assert_eq!(SystemScope::of_cubin(DEBUG), SystemScope::None);
        assert_eq!(calls(NESTED, &[90]).system_scope, SystemScope::None);
    }

    #[test]
    fn a_function_counts_for_the_kernels_that_call_it() {
        assert!(has(LINKED, "calls") && !has(LINKED, "other"));
        // As compiled, one variant of the function is for kernels of other files.
        assert_eq!(SystemScope::of_cubin(FUNCTION), SystemScope::All);
        // With its address in data.
        let mut known = LINKED.to_vec();
        let name = b".debug_frame\0";
        for at in memchr::memmem::find_iter(LINKED, name) {
            known[at + 1] = b'x';
        }
        assert_eq!(SystemScope::of_cubin(&known), SystemScope::All);
        // Without the relocations of the call.
        let mut unknown = LINKED.to_vec();
        let file = ElfFile64::<Endianness>::parse(LINKED).expect("a cubin");
        let calls = file.section_by_name(".rela.text.calls");
        let (start, len) = calls.and_then(|one| one.file_range()).expect("a section");
        unknown[start as usize..(start + len) as usize].fill(0);
        assert_eq!(SystemScope::of_cubin(&unknown), SystemScope::All);
    }

    #[test]
    fn a_function_of_a_text_counts_for_all_kernels() {
        let text =
            ".version 8.0\n.func (.param .b32 r) f(.param .b64 p) { BODY }\n.entry k() { ret; }";
        for (body, expected) in [
            ("st.volatile.u32 [p], 1;", SystemScope::All),
            ("st.u32 [p], 1;", SystemScope::None),
        ] {
            let text = text.replace("BODY", body);
            assert_eq!(SystemScope::of_text(text.as_bytes()), expected);
        }
    }

    #[test]
    fn a_kernel_that_another_launches_counts_for_it() {
        let text = String::from_utf8(TEXT.to_vec()).expect("UTF-8");
        for name in [
            "cnpv2Launch",
            "cudaLaunchDeviceV2",
            "cudaCDP2LaunchDeviceV2",
        ] {
            let text = format!("{text}\n.extern .func {name}();\n");
            assert!(has(text.as_bytes(), "n_plain"), "{name}");
        }
    }

    #[test]
    fn code_that_cannot_be_looked_at_counts() {
        const ABI_AT: usize = 7;
        const FLAGS_AT: usize = 48;
        let changed = |at: usize, byte: u8| {
            let mut image = CUBIN.to_vec();
            image[at] = byte;
            SystemScope::of_cubin(&image)
        };
        assert_eq!(changed(ABI_AT, 0), SystemScope::All);
        assert_eq!(changed(FLAGS_AT + 1, 61), SystemScope::All);
        assert_eq!(SystemScope::of_cubin(&CUBIN[..200]), SystemScope::All);
        assert_eq!(SystemScope::of_text(b"junk"), SystemScope::All);
        // Of CUDA 12 and before, for 9.0.
        let mut older = CUBIN.to_vec();
        older[ABI_AT] = OLDER_ABI;
        older[FLAGS_AT] = 90;
        assert_eq!(SystemScope::of_cubin(&older), SystemScope::of_cubin(CUBIN));
    }

    #[test]
    fn sections_that_overlap_are_not_read_without_bound() {
        const CODE: u64 = 64;
        const LEN: u64 = 1 << 20;
        // Sections of code, all of the same bytes.
        let overlapping = |sections: u16| {
            let mut image = CUBIN[..CODE as usize].to_vec();
            image.resize((CODE + LEN) as usize, 0);
            image[40..48].copy_from_slice(&(CODE + LEN).to_le_bytes());
            for (at, field) in [(56, 0), (58, 64), (60, sections + 2), (62, 1)] {
                image[at..at + 2].copy_from_slice(&field.to_le_bytes());
            }
            image.resize(image.len() + 64, 0);
            // Names.
            let kind = u64::from(object::elf::SHT_STRTAB) << 32;
            for word in [kind, 0, 0, CODE, 1, 0, 1, 0] {
                image.extend(word.to_le_bytes());
            }
            let kind = u64::from(object::elf::SHT_PROGBITS) << 32;
            let flags = u64::from(object::elf::SHF_ALLOC | object::elf::SHF_EXECINSTR);
            for word in [kind, flags, 0, CODE, LEN, 0, 1, 0].repeat(sections.into()) {
                image.extend(word.to_le_bytes());
            }
            SystemScope::of_cubin(&image)
        };
        assert_eq!(overlapping(2), SystemScope::None);
        assert_eq!(overlapping(1000), SystemScope::All);
    }

    /// An instruction with this opcode and order.
    fn word(opcode: u16, at: u32, field: u16) -> u128 {
        // Operands, a predicate, and fields for the scheduler, as in any instruction.
        let others = 0x000f_e200_0000_0000_0000_0010_0402_7000;
        u128::from(opcode) | others | u128::from(field) << at
    }

    #[test]
    fn instructions_count_by_their_order() {
        // LD, LDG, ST, STG, ATOM, ATOM.CAS, RED, ATOMG, ATOMG.CAS, in their forms.
        const OLD: [u16; 13] = [
            0x980, 0x381, 0x981, 0x385, 0x985, 0x386, 0x986, 0x98a, 0x38b, 0x98e, 0x3a8, 0x9a8,
            0x3a9,
        ];
        // USTGR, UREDGR, LDG and STG of 256 bits, ATOM, ATOMG, LDGMC, REDG, UBLKCP, UBLKRED.
        const NEW: [u16; 11] = [
            0x377, 0x378, 0x97e, 0x97f, 0x9a2, 0x9a3, 0x9a4, 0x9a5, 0x9a6, 0x3ba, 0x3bb,
        ];
        // LDS, STS, ATOMS, ATOMS.CAS, LDL, STL, CCTL, ERRBAR, LDGSTS, FENCE, ULDC.
        const NEITHER: [u16; 12] = [
            0x984, 0x388, 0x988, 0x38c, 0x38d, 0x983, 0x387, 0x98f, 0x9ab, 0xfae, 0x3c6, 0xab9,
        ];
        for order in 0..16 {
            let is = |opcode, is_80| is_system_scope(word(opcode, 77, order), is_80);
            let new = [8, 10, 12, 13, 14].contains(&order);
            assert!(OLD.iter().all(|one| is(*one, true) == new), "{order}");
            assert!(NEW.iter().all(|one| is(*one, true) == new), "{order}");
            let old = order >= 11;
            assert!(OLD.iter().all(|one| is(*one, false) == old), "{order}");
            assert!(!NEW.iter().any(|one| is(*one, false)), "{order}");
            assert!(!NEITHER.iter().any(|one| is(*one, true) || is(*one, false)));
        }
        // MEMBAR.SC and MEMBAR.ALL.
        for (scope, wide) in [(0, false), (1, false), (2, false), (3, true), (4, true)]
            .into_iter()
            .chain([(5, false), (6, false), (7, true)])
        {
            for (kind, is_80) in [(0, true), (8, true), (0, false), (8, false)] {
                assert_eq!(is_system_scope(word(0x992, 76, kind | scope), is_80), wide);
            }
        }
    }

    /// Instructions as ptxas 13.0 makes them.
    #[test]
    fn compiled_instructions_count() {
        for (word, is_80, expected) in WORDS {
            assert_eq!(is_system_scope(word, is_80), expected, "{word:#x}");
        }
    }

    const WORDS: [(u128, bool, bool); 29] = [
        // LDG.E.SYS, sm_75
        (0x000e_a200_0c1e_e900_0000_0004_ff00_7981, false, false),
        // LDG.E.STRONG.SYS, sm_75
        (0x000e_a200_0c1f_6900_0000_0004_ff00_7981, false, true),
        // LD.E.STRONG.GPU, sm_75
        (0x000e_a200_0c11_4900_0000_0004_ff00_7980, false, false),
        // MEMBAR.ALL.SYS, sm_75
        (0x000f_ea00_0000_b000_0000_0000_0000_7992, false, true),
        // ATOMG.E.ADD.STRONG.SYS, sm_75
        (0x000e_a200_081f_6144_0000_0002_ff02_09a8, false, true),
        // ATOMG.E.ADD.STRONG.GPU, sm_75
        (0x000e_a200_081f_4144_0000_0002_ff02_09a8, false, false),
        // ATOM.E.CAS.STRONG.SYS, sm_75
        (0x001e_a200_001f_6105_0000_0004_0202_738b, false, true),
        // MEMBAR.SC.SYS, sm_75
        (0x000f_ea00_0000_3000_0000_0000_0000_7992, false, true),
        // MEMBAR.SC.GPU, sm_75
        (0x000f_ea00_0000_2000_0000_0000_0000_7992, false, false),
        // LDG.E.CONSTANT.SYS, sm_75
        (0x000e_a200_0c1e_6900_0000_0004_ff00_7981, false, false),
        // LD.E, sm_80
        (0x000e_a200_0c10_1900_0000_0004_0203_7980, true, false),
        // LD.E.STRONG.SYS, sm_80
        (0x000e_a200_0c11_5900_0000_0004_0203_7980, true, true),
        // RED.E.ADD.STRONG.SYS, sm_80
        (0x000f_e200_0c11_4184_0000_0005_0200_098e, true, true),
        // RED.E.ADD.STRONG.GPU, sm_80
        (0x000f_e200_0c10_e184_0000_0005_0200_098e, true, false),
        // LDG.E.CONSTANT, sm_80
        (0x000e_a200_0c1e_9900_0000_0004_0203_7981, true, false),
        // LDG.E.MMIO.SYS, sm_80
        (0x000e_a200_0c1f_8900_0000_0004_ff05_7981, true, true),
        // ATOM.E.ADD.F32.FTZ.RN.STRONG.SYS, sm_90
        (0x0021_6200_0811_53c4_0000_0005_0205_79a2, true, true),
        // ATOM.E.ADD.F32.FTZ.RN.STRONG.GPU, sm_90
        (0x0021_6200_0810_f3c4_0000_0005_0205_79a2, true, false),
        // REDG.E.ADD.F32.FTZ.RN.STRONG.SYS, sm_90
        (0x002f_e200_0c11_5384_0000_0005_0200_79a6, true, true),
        // REDG.E.ADD.64.STRONG.SYS, sm_90
        (0x004f_e200_0c11_4584_0000_0004_0200_098e, true, true),
        // MEMBAR.ALL.SYS, sm_90
        (0x000f_ec00_0000_b000_0000_0000_0000_7992, true, true),
        // MEMBAR.SC.GPU, sm_90
        (0x000f_ec00_0000_2000_0000_0000_0000_7992, true, false),
        // UBLKCP.G.S, sm_90
        (0x0003_e200_0800_0405_0000_0006_0400_73ba, true, false),
        // LDG.E.ENL2.256, sm_100
        (0x002e_aa00_0812_190c_fe00_0004_0208_797e, true, false),
        // STG.E.STRONG.SYS, sm_100
        (0x002f_e200_0c11_5904_0000_0005_0200_7986, true, true),
        // ATOMG.E.EXCH.64.STRONG.SYS, sm_100
        (0x002e_a200_0c1f_5504_8000_0002_0404_79a8, true, true),
        // STG.E.STRONG.SYS, sm_100
        (0x002f_e200_0c11_5904_0000_0005_0200_7986, true, true),
        // ATOMG.E.CAS.64.STRONG.SYS, sm_120
        (0x002e_a200_001f_4506_0000_0004_0804_73a9, true, true),
        // ST.E.STRONG.SM, sm_120
        (0x002f_e200_0c10_b904_0000_0005_0200_7985, true, false),
    ];

    #[test]
    fn instructions_of_texts_count_by_their_modifiers() {
        for (instruction, expected) in [
            ("ld.volatile.u32 %r1, [%rd1];", true),
            ("ld.volatile.global.u32 %r1, [%rd1];", true),
            ("@%p1 st.volatile.global.v2.f32 [%rd1], {%f1, %f2};", true),
            ("ld.relaxed.sys.global.u32 %r1, [%rd1];", true),
            ("ld.acquire.sys.u8 %r1, [%rd1];", true),
            ("st.release.sys.global.u64 [%rd1], %rd2;", true),
            ("ld.mmio.relaxed.sys.global.u32 %r1, [%rd1];", true),
            ("atom.sys.global.add.u32 %r1, [%rd1], 1;", true),
            ("atom.acq_rel.sys.cas.b32 %r1, [%rd1], 1, 2;", true),
            ("red.relaxed.sys.global.add.f32 [%rd1], %f1;", true),
            ("st.async.mmio.release.sys.global.u32 [%rd1], %r1;", true),
            ("multimem.red.release.sys.global.add.u32 [%rd1], %r1;", true),
            ("membar.sys;", true),
            ("fence.sc.sys;", true),
            ("fence.acq_rel.sys;", true),
            (
                "fence.proxy.tensormap::generic.acquire.sys [%rd1], 128;",
                true,
            ),
            ("ld.global.cv.u32 %r1, [%rd1];", true),
            ("st.wt.u32 [%rd1], %r1;", true),
            ("label:ld.volatile.u32 %r1, [%rd1];", true),
            ("ld.u32/* */%r1, [%rd1]; st.volatile.u32 [%rd1], 1;", true),
            ("// one line\nmembar.sys;", true),
            ("ld.volatile.shared.u32 %r1, [%r2];", false),
            ("st.volatile.shared::cta.u32 [%r2], 1;", false),
            ("ld.volatile.local.u32 %r1, [%rd1];", false),
            (
                "atom.relaxed.sys.shared::cluster.add.u32 %r1, [%r2], 1;",
                false,
            ),
            ("ld.global.u32 %r1, [%rd1];", false),
            ("ld.global.nc.u32 %r1, [%rd1];", false),
            ("ld.global.cg.u32 %r1, [%rd1];", false),
            ("ld.relaxed.gpu.global.u32 %r1, [%rd1];", false),
            ("atom.global.add.u32 %r1, [%rd1], 1;", false),
            ("atom.acq_rel.gpu.add.u32 %r1, [%rd1], 1;", false),
            ("membar.gl;", false),
            ("fence.acq_rel.gpu;", false),
            ("cvt.u64.u32 %rd1, %r1; mov.u32 %r1, %sysreg;", false),
            ("// membar.sys;", false),
            ("/* membar.sys; */", false),
            (".pragma \"membar.sys\";", false),
            ("call.uni membar_sys.sysx, ();", false),
        ] {
            let text = format!(
                "//\n.version 8.0\n.visible .entry other(.param .u64 p) {{ ret; }}\n.entry k()\n{{ {instruction} ret; }}\n.visible .entry last() {{ ret; }}"
            );
            assert_eq!(has(text.as_bytes(), "k"), expected, "{instruction}");
            assert!(!has(text.as_bytes(), "other") && !has(text.as_bytes(), "last"));
        }
    }

    #[test]
    fn volatile_accesses_of_a_sort_to_its_own_memory_do_not_count() {
        let name = |kernel: &str| format!("_ZN3cub6detail10radix_sort{kernel}IiEvPT_");
        for (kernel, expected) in [
            ("29DeviceRadixSortOnesweepKernel", false),
            ("30DeviceRadixSortOnesweepKernels", true),
        ] {
            let kernel = name(kernel);
            let text = format!(".version 8.0\n.entry {kernel}() {{ membar.sys; ret; }}");
            assert_eq!(has(text.as_bytes(), &kernel), expected);
        }
    }

    #[test]
    fn findings_are_joined() {
        let of = |names: &[&str]| {
            SystemScope::of_hashes(names.iter().map(|name| hash_of(name.as_bytes())).collect())
        };
        let both = of(&["a", "b"]).or(of(&["b", "c"]));
        assert_eq!(both, of(&["c", "a", "b"]));
        assert!(both.has(b"a") && both.has(b"c\0") && !both.has(b"d"));
        assert_eq!(SystemScope::None.or(both.clone()), both);
        assert_eq!(both.clone().or(SystemScope::None), both);
        assert_eq!(both.or(SystemScope::All), SystemScope::All);
        assert!(SystemScope::All.has(b"a") && !SystemScope::None.has(b"a"));
    }

    proptest! {
        #[test]
        fn changed_images_are_read_without_panic(
            which in 0..3usize,
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..12),
            end in any::<prop::sample::Index>(),
        ) {
            let mut image = [CUBIN, FUNCTION, TEXT][which].to_vec();
            for (at, byte) in changes {
                let at = at.index(image.len());
                image[at] = byte;
            }
            image.truncate(end.index(image.len()) + image.len() / 2);
            SystemScope::of_cubin(&image);
            SystemScope::of_text(&image);
        }
    }
}
