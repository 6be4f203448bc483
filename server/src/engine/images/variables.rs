//! Variables of an image and their initial contents.
//!
//! A private instance can be reused by the next client once the initial contents of its variables are restored
//! ([`crate::engine::images::residents`]). That avoids a load, which would wait for a quiescent point. The current
//! contents are read for the next server ([`crate::engine::objects::snapshot`]).

use crate::engine::base::ordinal::Ordinal;
use crate::engine::base::pinned::is_affordable;
use crate::engine::gpu::Gpu;
use crate::engine::gpu::cubin::{
    Budget, EM_CUDA, KIND_TEXT, Used, entries, is_constant, is_of_driver,
};
use crate::engine::gpu::devices::Device;
use crate::engine::gpu::footprint::{at_top, declarations, of_declaration, without_comments};
use crate::engine::images::contents::{Content, Findings, Raw};
use mpsshim_api::cuda::{
    CUDA_ERROR_INVALID_IMAGE, CUDA_ERROR_NOT_FOUND, CUDA_ERROR_OUT_OF_MEMORY, CUdeviceptr,
    CUresult, CUstream,
};
use object::read::elf::{ElfFile64, FileHeader};
use object::{
    Endianness, Object, ObjectSection, ObjectSymbol, SectionFlags, SymbolFlags, SymbolKind,
};
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Images larger than this are analyzed only if their kernels keep state, bytes: the analysis delays each first load.
pub const LONG: usize = 1 << 20;
/// Images larger than this are not analyzed, bytes.
const LONGEST: usize = 64 << 20;
/// Variables of an image.
const MOST: usize = 1024;
/// Bytes of an image's variables kept in the server's memory; variables that are initially zero are not counted.
const MOST_KEPT: u64 = 256 << 10;
/// Bytes written to restore all variables.
const MOST_WRITTEN: u64 = 16 << 20;
/// Bytes of the variables' names, which are kept after the image is unloaded.
const MOST_NAMES: usize = 64 << 10;
/// Number of images whose variables are known.
pub const MOST_KNOWN: usize = 1024;
/// The largest alignment of variables that clients may hold in blocks of their own memory, bytes.
const BLOCK_ALIGN: u64 = 512;
/// Source for restoring variables that are initially zero.
static ZEROS: [u8; 1 << 16] = [0; 1 << 16];

/// A variable that kernels or the client can write.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Variable {
    /// Name including its NUL.
    name: Box<[u8]>,
    len: u64,
    /// Initially zero.
    zeros: bool,
    /// Code may use its address. Only the client, by name, can write any other.
    used: bool,
    /// Only the client reaches it, by the address that it asks for, so that any memory may hold it: no code uses it, it
    /// shares no byte with another symbol, and it is not in a constant bank, which kernels read without its address.
    apart: bool,
}

/// All variables of an image; `None` if they cannot be determined or exceed a limit.
pub type Variables = Option<Arc<[Variable]>>;

/// Known variables by image.
pub type KnownVariables = Findings<Variables>;

/// The variables of an image on devices of these compute capabilities. Its content is analyzed once.
pub fn find(
    known: &KnownVariables,
    hash: &[u8; 32],
    content: &Content,
    archs: impl Iterator<Item = u32>,
) -> Variables {
    if content.len() > LONGEST {
        return None;
    }
    known.look_up(hash, || {
        let bytes = &content[..content.len() - 1];
        let archs: HashSet<u32> = archs.collect();
        let found: HashSet<_> = archs.iter().map(|arch| variables(bytes, *arch)).collect();
        // A library is one object for all devices.
        let only = match found.len() {
            1 => found.into_iter().next().flatten(),
            _ => None,
        };
        only.map(Arc::from)
    })
}

/// Bytes of the variables of an image; `None` if they cannot be determined or exceed a limit.
pub fn written_bytes(image: &[u8], arch: u32) -> Option<u64> {
    let found = variables(image, arch)?;
    Some(found.iter().map(|one| one.len).sum())
}

/// The variables of the code that a device of a compute capability (`10 * major + minor`) would run; `None` if they
/// cannot be determined with certainty.
fn variables(image: &[u8], arch: u32) -> Option<Vec<Variable>> {
    let found = if image.starts_with(b"\x7fELF") {
        of_cubin(image)?
    } else {
        let entries = entries(image)?;
        let mut budget = Budget::of_code(image);
        if entries.is_empty() {
            of_text(image)?
        } else if let Some(best) = entries
            .iter()
            .filter(|one| one.fits(arch))
            .map(|one| one.arch)
            .max()
        {
            let mut best = entries
                .iter()
                .filter(|one| one.fits(arch) && one.arch == best);
            let (only, None) = (best.next()?, best.next()) else {
                return None;
            };
            of_cubin(&only.content(&mut budget)?)?
        } else {
            let mut texts = entries.iter().filter(|one| one.kind == KIND_TEXT);
            let (only, None) = (texts.next()?, texts.next()) else {
                return None;
            };
            of_text(&only.content(&mut budget)?)?
        }
    };
    let names: HashSet<_> = found.iter().map(|one| &one.name).collect();
    let sum = |zeros: bool| {
        let such = found.iter().filter(|one| one.zeros == zeros);
        such.fold(0u64, |sum, one| sum.saturating_add(one.len))
    };
    let (kept, zeros) = (sum(false), sum(true));
    let of_names: usize = found.iter().map(|one| one.name.len()).sum();
    let fits = found.len() <= MOST
        && of_names <= MOST_NAMES
        && kept <= MOST_KEPT
        && kept.saturating_add(zeros) <= MOST_WRITTEN;
    // Two variables of the same name could not be looked up separately.
    (fits && names.len() == found.len()).then_some(found)
}

fn of_cubin(bytes: &[u8]) -> Option<Vec<Variable>> {
    /// Section flag `SHF_WRITE`.
    const WRITE: u64 = object::elf::SHF_WRITE as u64;
    /// Flag in a symbol's `st_other`: the variable is managed, so its content lies elsewhere.
    const MANAGED: u8 = 4;
    let file = ElfFile64::<Endianness>::parse(bytes).ok()?;
    if file.elf_header().e_machine(file.endian()) != EM_CUDA {
        return None;
    }
    let mut budget = Budget::of_names(bytes);
    let mut sections = HashMap::new();
    for section in file.sections().filter(|section| section.size() > 0) {
        let name = section.name_bytes().unwrap_or_default();
        budget.spend(name.len() as u64)?;
        let SectionFlags::Elf { sh_flags } = section.flags() else {
            return None;
        };
        let is_global = name.starts_with(b".nv.global");
        if is_global || name.starts_with(b".nv.constant3") {
            let section_of_variables = Section {
                zeros: section.kind().is_bss(),
                len: section.size(),
                align: section.align(),
                is_global,
                symbols: Vec::new(),
            };
            sections.insert(section.index(), section_of_variables);
        } else if sh_flags & WRITE != 0 && !name.starts_with(b".nv.shared") {
            return None;
        }
    }
    let mut found = Vec::new();
    let used = Used::of(&file, &mut Budget::of_names(bytes)).unwrap_or(Used::All);
    for symbol in file.symbols() {
        let Some(index) = symbol.section_index() else {
            let name = symbol.name().ok()?;
            budget.spend(name.len() as u64)?;
            let known = name.is_empty() || name.starts_with(".nv.") || is_of_driver(name);
            if symbol.is_undefined() && !known {
                return None;
            }
            continue;
        };
        let Some(section) = sections.get_mut(&index) else {
            continue;
        };
        // All relocations are unclear if one names the symbol of a section.
        if symbol.kind() != SymbolKind::Section {
            section.symbols.push((symbol.address(), symbol.size()));
        }
        if symbol.size() == 0 {
            continue;
        }
        let SymbolFlags::Elf { st_other, .. } = symbol.flags() else {
            return None;
        };
        if st_other & MANAGED != 0 || found.len() > MOST {
            return None;
        }
        let name = symbol.name().ok()?;
        budget.spend(name.len() as u64)?;
        if !is_constant(name, symbol.size()) {
            let used = used.has(symbol.index());
            let variable = Variable {
                name: [name.as_bytes(), b"\0"].concat().into(),
                len: symbol.size(),
                zeros: section.zeros,
                used,
                apart: !used && section.is_global && section.align <= BLOCK_ALIGN,
            };
            found.push((variable, (index, symbol.address())));
        }
    }
    for section in sections.values_mut() {
        section.symbols.sort_unstable();
        if !section.is_whole() {
            return None;
        }
    }
    let shared: HashMap<_, _> = sections
        .iter()
        .map(|(index, section)| (*index, section.shared()))
        .collect();
    let found = found.into_iter().map(|(variable, (section, start))| {
        let is_shared = shared.get(&section).is_none_or(|all| all.contains(&start));
        Variable {
            apart: variable.apart && !is_shared,
            ..variable
        }
    });
    Some(found.collect())
}

/// A section of variables.
struct Section {
    /// Initially zero.
    zeros: bool,
    len: u64,
    align: u64,
    /// In global memory, not in a constant bank.
    is_global: bool,
    /// Address and bytes of each symbol, sorted.
    symbols: Vec<(u64, u64)>,
}

impl Section {
    /// Whether the symbols name all of its data. Unnamed data can only lie in gaps between symbols; a gap larger than the
    /// alignment may contain some.
    fn is_whole(&self) -> bool {
        let mut end = 0u64;
        for (start, len) in self.symbols.iter().filter(|(_, len)| *len > 0) {
            if *start > end.saturating_add(self.align) {
                return false;
            }
            end = end.max(start.saturating_add(*len));
        }
        self.len <= end.saturating_add(self.align)
    }

    /// The addresses of symbols that share bytes with others.
    fn shared(&self) -> HashSet<u64> {
        let mut found = HashSet::new();
        // The symbol that reaches furthest so far.
        let mut before: Option<(u64, u64)> = None;
        for (start, len) in &self.symbols {
            let end = start.saturating_add((*len).max(1));
            if let Some((other, reaches)) = before
                && *start < reaches
            {
                found.extend([other, *start]);
            }
            if before.is_none_or(|(_, reaches)| reaches <= end) {
                before = Some((*start, end));
            }
        }
        found
    }
}

fn of_text(bytes: &[u8]) -> Option<Vec<Variable>> {
    let text = without_comments(bytes);
    let has = |word: &str| memchr::memmem::find(&text, word.as_bytes()).is_some();
    let mut used = has(".entry") || has(".func");
    let mut found = Vec::new();
    for space in [&b".global"[..], b".const"] {
        for declaration in declarations(&text, space) {
            let declaration = declaration?;
            let words = std::str::from_utf8(declaration).ok()?;
            let [variable] = at_top(words, ',')[..] else {
                return None;
            };
            if words.contains(".managed") || found.len() > MOST {
                return None;
            }
            let head = variable.split(['=', '[']).next()?;
            let name = head.split_ascii_whitespace().next_back()?;
            let len = of_declaration(declaration)?;
            used |= variable
                .split_once('=')
                .is_some_and(|(_, value)| names_any(value));
            if len > 0 && !is_constant(name, len) {
                found.push(Variable {
                    name: [name.as_bytes(), b"\0"].concat().into(),
                    len,
                    zeros: !variable.contains('='),
                    used,
                    apart: space == b".global"
                        && align_of(head).is_some_and(|one| one <= BLOCK_ALIGN),
                });
            }
        }
    }
    for variable in &mut found {
        variable.used = used;
        variable.apart &= !used;
    }
    Some(found)
}

/// Whether the initial value of a variable names anything, such as another variable. Numbers begin with a digit.
fn names_any(value: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || matches!(c, '_' | '$' | '%' | '.');
    let mut words = value.split(|c| !is_part(c)).filter(|word| !word.is_empty());
    words.any(|word| !word.starts_with(|c: char| c.is_ascii_digit()))
}

/// The alignment in a declaration, bytes; 0 if there is none.
fn align_of(declaration: &str) -> Option<u64> {
    let Some((_, behind)) = declaration.split_once(".align") else {
        return Some(0);
    };
    behind.split_ascii_whitespace().next()?.parse().ok()
}

/// Contents of a loaded image's variables on a device before any kernel or client could write them.
#[derive(Debug)]
pub struct AsLoaded {
    variables: Arc<[Variable]>,
    /// Address and initial contents of each.
    held: Vec<(CUdeviceptr, Before)>,
}

#[derive(Debug)]
enum Before {
    Zeros(u64),
    Bytes(Box<[u8]>),
}

impl Before {
    fn bytes(&self) -> Box<[u8]> {
        match self {
            Before::Zeros(len) => vec![0; *len as usize].into(),
            Before::Bytes(bytes) => bytes.clone(),
        }
    }

    /// Whether `bytes` equal the initial contents.
    fn is(&self, bytes: &[u8]) -> bool {
        match self {
            Before::Zeros(len) => bytes.len() as u64 == *len && bytes.iter().all(|byte| *byte == 0),
            Before::Bytes(before) => **before == *bytes,
        }
    }
}

impl AsLoaded {
    /// Reads the variables of an image that was just loaded.
    ///
    /// # Errors
    /// Driver errors; `CUDA_ERROR_INVALID_IMAGE` if a variable's size differs from the image's;
    /// `CUDA_ERROR_OUT_OF_MEMORY` if the machine has too little memory for their contents.
    pub fn read(
        gpu: &Gpu,
        raw: Raw,
        device: Ordinal,
        variables: &Arc<[Variable]>,
    ) -> Result<AsLoaded, CUresult> {
        let kept = variables.iter().filter(|one| !one.zeros);
        let kept: u64 = kept.map(|one| one.len).sum();
        if kept > 0 && !is_affordable(kept) {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        let driver = &gpu.driver;
        let device = &gpu.devices[device];
        device.make_current(driver)?;
        let mut all = Vec::with_capacity(variables.len());
        for variable in variables.iter() {
            let (mut start, mut len, name) = (0, 0, variable.name.as_ptr().cast());
            match raw {
                Raw::Module(module) => {
                    driver.module_get_global(&mut start, &mut len, module, name)?
                }
                Raw::Library(library) => {
                    driver.library_get_global(&mut start, &mut len, library, name)?
                }
            }
            if len as u64 != variable.len {
                return Err(CUDA_ERROR_INVALID_IMAGE);
            }
            let before = match variable.zeros {
                true => Before::Zeros(variable.len),
                false => Before::Bytes(vec![0; len].into()),
            };
            all.push((start, before));
        }
        let nonzero = |(start, before): &(CUdeviceptr, Before)| match before {
            Before::Bytes(bytes) => Some((*start, bytes.len() as u64)),
            Before::Zeros(_) => None,
        };
        let places: Vec<_> = all.iter().filter_map(nonzero).collect();
        let contents = contents(gpu, device, &places)?;
        let kept = all.iter_mut().filter_map(|(_, before)| match before {
            Before::Bytes(bytes) => Some(bytes),
            Before::Zeros(_) => None,
        });
        for (bytes, content) in kept.zip(contents) {
            *bytes = content;
        }
        Ok(AsLoaded {
            variables: variables.clone(),
            held: all,
        })
    }

    /// First address and bytes of each variable.
    pub fn places(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let each = self.held.iter().zip(self.variables.iter());
        each.map(|((start, _), variable)| (*start, variable.len))
    }

    /// Bytes of the variable of this name, NUL included, if only the client reaches it, so that its own memory may hold it.
    pub fn apart(&self, name: &[u8]) -> Option<u64> {
        self.find_apart(name).map(|(variable, _)| variable.len)
    }

    fn find_apart(&self, name: &[u8]) -> Option<(&Variable, &Before)> {
        let mut each = self.variables.iter().zip(&self.held);
        let found = each.find(|(variable, _)| *variable.name == *name && variable.apart);
        found.map(|(variable, (_, before))| (variable, before))
    }

    /// Stores the initial contents of such a variable in `[start, start + len)` of device memory, which no work uses.
    ///
    /// # Errors
    /// Driver errors; `CUDA_ERROR_NOT_FOUND` if the image has no such variable of this name and size.
    pub fn place(
        &self,
        gpu: &Gpu,
        device: Ordinal,
        name: &[u8],
        (start, len): (u64, u64),
    ) -> Result<(), CUresult> {
        let found = self.find_apart(name).filter(|(one, _)| one.len == len);
        let (_, before) = found.ok_or(CUDA_ERROR_NOT_FOUND)?;
        let bytes = match before {
            Before::Zeros(_) => None,
            Before::Bytes(bytes) => Some((0, &bytes[..])),
        };
        store(gpu, device, (start, len), bytes.into_iter())
    }

    /// Reads the current contents of each variable. If the client knows no variable of the image (`by_code`), those that no
    /// code uses have their initial contents and are not read. No work of the image may be in flight.
    ///
    /// # Errors
    /// Driver errors; `CUDA_ERROR_OUT_OF_MEMORY` if the machine has too little memory.
    pub fn read_again(
        &self,
        gpu: &Gpu,
        device: Ordinal,
        by_code: bool,
    ) -> Result<Vec<Box<[u8]>>, CUresult> {
        if !is_affordable(self.places().map(|(_, len)| len).sum()) {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        let is_read = |variable: &Variable| variable.used || !by_code;
        let each = self.places().zip(self.variables.iter());
        let places: Vec<_> = each
            .filter(|(_, variable)| is_read(variable))
            .map(|(place, _)| place)
            .collect();
        let mut read = contents(gpu, &gpu.devices[device], &places)?.into_iter();
        let each = self.variables.iter().zip(&self.held);
        let now = each.map(|(variable, (_, before))| match is_read(variable) {
            true => read.next().unwrap_or_default(),
            false => before.bytes(),
        });
        Ok(now.collect())
    }

    /// Names, including their NUL, and current contents of the variables whose contents differ from the initial ones.
    pub fn changed<'a>(
        &'a self,
        now: &'a [Box<[u8]>],
    ) -> impl Iterator<Item = (&'a [u8], &'a [u8])> {
        let each = self.variables.iter().zip(&self.held).zip(now);
        each.filter(|((_, (_, before)), now)| !before.is(now))
            .map(|((variable, _), now)| (&variable.name[..], &now[..]))
    }

    /// Writes variables by name. No work of the image may be in flight.
    ///
    /// # Errors
    /// Driver errors; `CUDA_ERROR_NOT_FOUND` if the image has no variable of this name and size.
    pub fn put(
        &self,
        gpu: &Gpu,
        device: Ordinal,
        contents: &[(&[u8], &[u8])],
    ) -> Result<(), CUresult> {
        let place = |name: &[u8], len: usize| {
            let mut each = self.variables.iter().zip(&self.held);
            let same = |one: &Variable| *one.name == *name && usize::try_from(one.len) == Ok(len);
            let found = each.find(|(variable, _)| same(variable));
            found.map(|(_, (start, _))| *start)
        };
        let places = contents
            .iter()
            .map(|(name, bytes)| place(name, bytes.len()).ok_or(CUDA_ERROR_NOT_FOUND));
        let places: Vec<u64> = places.collect::<Result<_, _>>()?;
        let (driver, device) = (&gpu.driver, &gpu.devices[device]);
        on_stream(gpu, device, |stream| {
            for (start, (_, bytes)) in places.iter().zip(contents) {
                driver.memcpy_htod_async(*start, bytes.as_ptr() as u64, bytes.len(), stream)?;
            }
            Ok(())
        })
    }

    /// Restores the initial contents of the variables. No work of the image may be in flight.
    ///
    /// # Errors
    /// Driver errors.
    pub fn put_back(&self, gpu: &Gpu, device: Ordinal) -> Result<(), CUresult> {
        if self.held.is_empty() {
            return Ok(());
        }
        let (driver, device) = (&gpu.driver, &gpu.devices[device]);
        on_stream(gpu, device, |stream| {
            for (start, before) in &self.held {
                let put = |at: u64, bytes: &[u8]| {
                    let from = bytes.as_ptr() as u64;
                    driver.memcpy_htod_async(start + at, from, bytes.len(), stream)
                };
                match before {
                    Before::Bytes(bytes) => put(0, bytes)?,
                    Before::Zeros(len) => {
                        for at in (0..*len).step_by(ZEROS.len()) {
                            let part = (len - at).min(ZEROS.len() as u64);
                            put(at, &ZEROS[..part as usize])?;
                        }
                    }
                }
            }
            Ok(())
        })
    }
}

/// The contents of these ranges, first address and bytes, of device memory. Small ones are copied to pinned memory: a copy to
/// other host memory takes 10 µs, and the driver copies no two variables at once.
///
/// # Errors
/// Driver errors.
fn contents(gpu: &Gpu, device: &Device, places: &[(u64, u64)]) -> Result<Vec<Box<[u8]>>, CUresult> {
    if places.is_empty() {
        return Ok(Vec::new());
    }
    let driver = &gpu.driver;
    let all = places.iter().map(|(_, len)| len).sum::<u64>();
    let collected = gpu.flags.collect(all as usize, |mut to| {
        on_stream(gpu, device, |stream| {
            for (start, len) in places {
                driver.memcpy_dtoh_async(to, *start, *len as usize, stream)?;
                to += len;
            }
            Ok(())
        })
    });
    if let Some(collected) = collected {
        let (collected, mut at) = (collected?, 0);
        let next = |(_, len): &(u64, u64)| {
            let from = at;
            at += *len as usize;
            collected[from..at].into()
        };
        return Ok(places.iter().map(next).collect());
    }
    let room = |(_, len): &(u64, u64)| vec![0; *len as usize].into_boxed_slice();
    let mut found: Vec<Box<[u8]>> = places.iter().map(room).collect();
    on_stream(gpu, device, |stream| {
        for ((start, _), bytes) in places.iter().zip(&mut found) {
            let to = bytes.as_mut_ptr() as u64;
            driver.memcpy_dtoh_async(to, *start, bytes.len(), stream)?;
        }
        Ok(())
    })?;
    Ok(found)
}

/// Clears `[start, start + len)` in device memory, which no work uses, and then stores bytes there, by their offsets.
///
/// # Errors
/// Driver errors.
pub fn store<'a>(
    gpu: &Gpu,
    device: Ordinal,
    (start, len): (u64, u64),
    parts: impl Iterator<Item = (u64, &'a [u8])>,
) -> Result<(), CUresult> {
    let driver = &gpu.driver;
    on_stream(gpu, &gpu.devices[device], |stream| {
        driver.memset_d8_async(start, 0, len as usize, stream)?;
        for (offset, bytes) in parts {
            let from = bytes.as_ptr() as u64;
            driver.memcpy_htod_async(start + offset, from, bytes.len(), stream)?;
        }
        Ok(())
    })
}

/// Submits copies to a stream and waits for them, even if submitting failed.
fn on_stream(
    gpu: &Gpu,
    device: &Device,
    copy: impl FnOnce(CUstream) -> Result<(), CUresult>,
) -> Result<(), CUresult> {
    let driver = &gpu.driver;
    device.make_current(driver)?;
    let stream = device.take_stream(driver, 0)?;
    let copied = copy(stream);
    let done = driver.stream_synchronize(stream);
    if done.is_ok() {
        device.keep_stream(driver, 0, stream);
    }
    copied.and(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(declarations: &str) -> Option<Vec<(String, u64, bool)>> {
        let code = ".visible .entry k(.param .u64 .ptr .global .align 4 p)\n{ ld.const.f32 %f1, [t]; ret; }\n";
        let image = format!(".version 8.0\n{declarations}\n{code}\0");
        let shown = |one: Variable| {
            let name = String::from_utf8_lossy(&one.name).into_owned();
            (name, one.len, one.zeros)
        };
        let found = variables(image.as_bytes(), 90)?;
        Some(found.into_iter().map(shown).collect())
    }

    #[test]
    fn variables_of_texts_are_found() {
        assert_eq!(of(""), Some(vec![]));
        assert_eq!(of("// .global .u32 no;"), Some(vec![]));
        assert_eq!(
            of(
                ".visible .global .align 4 .u32 a = 5;\n.global .align 8 .b8 b[16];.const .f32 c[2];"
            ),
            Some(vec![
                ("a\0".into(), 4, false),
                ("b\0".into(), 16, true),
                ("c\0".into(), 8, true)
            ])
        );
        // Literals are never written.
        assert_eq!(of(".global .align 1 .b8 $str[2] = {65, 0};"), Some(vec![]));
    }

    #[test]
    fn variables_of_a_cubin_are_used_if_code_or_data_names_them() {
        macro_rules! fixture {
            ($name:literal) => {
                &include_bytes!(concat!("../../../../tests/fixtures/variables/", $name))[..]
            };
        }
        let used = |cubin: &[u8]| {
            let mut found = variables(cubin, 90).expect("a cubin");
            found.sort_by(|one, other| one.name.cmp(&other.name));
            let shown = |one: Variable| (String::from_utf8(one.name.into()).unwrap(), one.used);
            found.into_iter().map(shown).collect::<Vec<_>>()
        };
        let named = |name: &str, is_used| (format!("{name}\0"), is_used);
        assert_eq!(
            used(fixture!("unused.sm_90.cubin")),
            [named("counter", false), named("limits", false)]
        );
        assert_eq!(
            used(fixture!("referenced.sm_90.cubin")),
            ["counter", "target", "where"].map(|name| named(name, true))
        );
        assert_eq!(
            used(fixture!("function.sm_90.cubin")),
            [named("counter", true)]
        );
        assert_eq!(
            used(fixture!("condition.sm_90.cubin")),
            [named("rounds", true)]
        );
    }

    #[test]
    fn variables_that_only_the_client_reaches_are_apart() {
        let apart = |image: &[u8]| -> Vec<(String, bool)> {
            let found = variables(image, 90).expect("variables");
            let shown = |one: Variable| (String::from_utf8(one.name.into()).unwrap(), one.apart);
            found.into_iter().map(shown).collect()
        };
        let named = |name: &str, is_apart| (format!("{name}\0"), is_apart);
        let cubin = include_bytes!("../../../../tests/fixtures/variables/unused.sm_90.cubin");
        let mut found = apart(cubin);
        found.sort();
        assert_eq!(found, [named("counter", true), named("limits", true)]);
        let used = include_bytes!("../../../../tests/fixtures/variables/referenced.sm_90.cubin");
        assert!(apart(used).iter().all(|(_, is_apart)| !is_apart));
        let of = |declarations: &str| apart(format!(".version 8.0\n{declarations}").as_bytes());
        let (a, b) = (
            ".global .align 4 .u32 a;",
            ".global .align 8 .b8 b[8] = {0x1, -2, 3U};",
        );
        let data = format!("{a}\n{b}\n.const .f32 c = 0f3F800000;");
        assert_eq!(
            of(&data),
            [named("a", true), named("b", true), named("c", false)]
        );
        // Code, or an address in another variable.
        for more in [
            ".visible .entry k() { ret; }",
            ".func f() { ret; }",
            ".global .u64 d = a;",
            ".global .u64 d[2] = {0, generic(a)};",
        ] {
            let found = of(&format!("{data}\n{more}"));
            assert!(found.iter().all(|(_, is_apart)| !is_apart), "{more}");
        }
        assert_eq!(of(".global .align 1024 .u32 a;"), [named("a", false)]);
    }

    #[test]
    fn symbols_that_share_bytes_are_not_apart() {
        let shared = |symbols: &[(u64, u64)]| {
            let section = Section {
                zeros: true,
                len: 64,
                align: 8,
                is_global: true,
                symbols: symbols.to_vec(),
            };
            let mut found: Vec<u64> = section.shared().into_iter().collect();
            found.sort_unstable();
            found
        };
        assert!(shared(&[(0, 8), (8, 8), (16, 4)]).is_empty());
        assert_eq!(shared(&[(0, 8), (0, 8), (8, 8)]), [0]);
        assert_eq!(shared(&[(0, 32), (8, 8), (24, 4), (32, 4)]), [0, 8, 24]);
        // A name without a size.
        assert_eq!(shared(&[(0, 8), (4, 0), (8, 8)]), [0, 4]);
        assert_eq!(shared(&[(0, 0), (0, 8), (8, 8)]), [0]);
    }

    #[test]
    fn what_cannot_be_told_for_certain_is_not_told() {
        for declarations in [
            ".global .attribute(.managed) .align 4 .u32 a;",
            ".global .u32 a, b;",
            ".global .strange a;",
            ".global .u32 a; .global .u32 a;",
            ".global .b8 a[16777217];",
            ".global .b8 a[262145] = {1};",
            ".global .u32 a",
        ] {
            assert_eq!(of(declarations), None, "{declarations}");
        }
        let many: String = (0..=MOST)
            .map(|n| format!(".global .u32 a{n};\n"))
            .collect();
        assert_eq!(of(&many), None);
        let long = format!(".global .u32 {};", "a".repeat(MOST_NAMES));
        assert_eq!(of(&long), None);
        assert!(variables(b"\x7fELF but none", 90).is_none());
    }
}
