//! The device code of files, and how it binds a program to its server.

use crate::engine::gpu::cubin::{EM_CUDA, Entry, FATBIN, KIND_TEXT, entries, entries_at, leaves};
use crate::engine::images::variables::written_bytes;
use memchr::memmem;
use object::Endianness;
use object::read::elf::{ElfFile64, FileHeader};

/// How an image binds a session to its server (docs/faults.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageBonds {
    /// Its kernels may store addresses of its functions, or of memory that they allocate.
    pub stores_addresses: bool,
    /// Bytes of variables that its kernels may write; `None` if they cannot be saved.
    pub variables: Option<u64>,
}

/// How an image binds a session on a device of this compute capability (`10 * major + minor`); `None` if it has no code
/// for that.
pub fn image_bonds(image: &[u8], arch: u32) -> Option<ImageBonds> {
    let is_for = |entry: &Entry<'_>| entry.fits(arch) || entry.kind == KIND_TEXT;
    if entries(image).is_some_and(|all| !all.is_empty() && !all.iter().any(is_for)) {
        return None;
    }
    let found = leaves(image, arch);
    Some(ImageBonds {
        stores_addresses: found.addresses,
        variables: match found.variables {
            true => written_bytes(image, arch),
            false => Some(0),
        },
    })
}

/// The images that `nvcc` has linked to a program or library, or else the file itself.
pub fn images_of(file: &[u8]) -> Vec<&[u8]> {
    let is_program = ElfFile64::<Endianness>::parse(file)
        .is_ok_and(|elf| elf.elf_header().e_machine(elf.endian()) != EM_CUDA);
    match is_program {
        true => fatbins_in(file),
        false => vec![file],
    }
}

fn fatbins_in(mut rest: &[u8]) -> Vec<&[u8]> {
    let mut found = Vec::new();
    while let Some(at) = memmem::find(rest, &FATBIN) {
        rest = &rest[at..];
        let image = entries_at(rest).map(|range| &rest[..range.end]);
        match image.filter(|image| entries(image).is_some_and(|all| !all.is_empty())) {
            Some(image) => {
                found.push(image);
                rest = &rest[image.len()..];
            }
            None => rest = &rest[FATBIN.len()..],
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_linked_images_is_one() {
        let calling = include_bytes!("../../../../tests/fixtures/variables/calling.sm_90.cubin");
        assert_eq!(images_of(calling), [&calling[..]]);
        let bonds = ImageBonds {
            stores_addresses: false,
            variables: Some(0),
        };
        assert_eq!(image_bonds(calling, 90), Some(bonds));
        let taking = include_bytes!("../../../../tests/fixtures/variables/taking.sm_90.cubin");
        assert!(image_bonds(taking, 90).is_some_and(|one| one.stores_addresses));
        let counts = include_bytes!("../../../../tests/fixtures/variables/function.sm_90.cubin");
        let counted = image_bonds(counts, 90).map(|one| one.variables);
        assert_eq!(counted, Some(Some(4)));
    }

    #[test]
    fn fatbins_of_a_program_are_found() {
        let fatbin = include_bytes!("../../../../tests/fixtures/nested.fatbin");
        assert!(entries(fatbin).is_some_and(|all| !all.is_empty()));
        let broken = [0x50, 0xed, 0x55, 0xba, 1, 0];
        let section = [&fatbin[..], &[0; 8], fatbin, &broken].concat();
        assert_eq!(fatbins_in(&section), [&fatbin[..], &fatbin[..]]);
        let own = std::fs::read(std::env::current_exe().expect("a path")).expect("a file");
        let program = [&own[..], &section].concat();
        assert!(images_of(&program).ends_with(&[&fatbin[..], &fatbin[..]]));
        // Code for one compute capability alone.
        assert!(image_bonds(fatbin, 80).is_none() && image_bonds(fatbin, 90).is_some());
    }
}
