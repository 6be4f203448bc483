//! The length of an image: the driver's calls take only a pointer.
//!
//! A fatbin wrapper (put into programs by `nvcc`) points at a fatbin; the headers of a fatbin and of a cubin (ELF) give
//! their length; anything else is PTX text that ends with a NUL. The program guarantees only the memory that the
//! headers describe, so nothing beyond is read; impossible headers are refused.

use std::ffi::CStr;

use mpsshim_api::cuda::{CUDA_ERROR_INVALID_IMAGE, CUDA_ERROR_INVALID_VALUE};

use crate::ffi::Status;

const WRAPPER_MAGIC: u32 = 0x4662_43b1;
const FATBIN_MAGIC: u32 = 0xba55_ed50;
const ELF_MAGIC: u32 = u32::from_le_bytes(*b"\x7fELF");
/// Maximum length of an image; a greater one means a broken header.
const LONGEST: u64 = 4 << 30;
const ELF_HEADER: usize = 64;
const ELF_SECTION: usize = 64;
const ELF_SEGMENT: usize = 56;
const ELF_NOBITS: u32 = 8;

/// An image in the program's memory.
#[derive(Clone, Copy, Debug)]
pub struct Image {
    address: *const u8,
    len: usize,
}

impl Image {
    /// The image that `pointer` leads to.
    ///
    /// # Safety
    /// `pointer` is null or leads to an image, or the wrapper of one, as `cuModuleLoadData` takes it, that lives as
    /// long as the result is used.
    pub unsafe fn find(pointer: *const u8) -> Status<Image> {
        if pointer.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let mut address = pointer;
        // SAFETY: the magic number decides how much more may be read; each kind has its header.
        unsafe {
            if magic(address) == Some(WRAPPER_MAGIC) {
                let header = bytes::<16>(address);
                let version = u32_at(&header, 4);
                let inner = u64_at(&header, 8);
                if !(1..=2).contains(&version) || inner == 0 {
                    return Err(CUDA_ERROR_INVALID_IMAGE);
                }
                address = inner as *const u8;
            }
            let len = match magic(address) {
                Some(FATBIN_MAGIC) => fatbin_len(&bytes::<16>(address)),
                Some(ELF_MAGIC) => elf_len(address),
                _ => text_len(address),
            };
            match len {
                Some(len) if len > 0 && len <= LONGEST => Ok(Image {
                    address,
                    len: len as usize,
                }),
                _ => Err(CUDA_ERROR_INVALID_IMAGE),
            }
        }
    }

    /// The image that fills a file, to which the caller has appended a NUL.
    ///
    /// # Errors
    /// As [`Image::find`]; an image whose headers describe more bytes than the file has is refused.
    pub fn find_in(file: &[u8]) -> Status<&[u8]> {
        let head = file.get(..4).map(|head| u32_at(head, 0));
        let least = match head {
            Some(ELF_MAGIC) => ELF_HEADER,
            Some(FATBIN_MAGIC) => 16,
            // A wrapper holds an address, which means nothing in a file.
            Some(WRAPPER_MAGIC) => return Err(CUDA_ERROR_INVALID_IMAGE),
            _ => 1,
        };
        if file.len() < least || file.last() != Some(&0) {
            return Err(CUDA_ERROR_INVALID_IMAGE);
        }
        if head == Some(ELF_MAGIC) && !tables_inside(file) {
            return Err(CUDA_ERROR_INVALID_IMAGE);
        }
        // SAFETY: the headers that are read are inside the file, and text ends at its NUL.
        let image = unsafe { Image::find(file.as_ptr())? };
        file.get(..image.len).ok_or(CUDA_ERROR_INVALID_IMAGE)
    }

    /// Its content.
    ///
    /// # Safety
    /// As promised to [`Image::find`], for the life of the result.
    pub unsafe fn content<'a>(self) -> &'a [u8] {
        // SAFETY: the caller's promise; the length comes from the image's own headers.
        unsafe { std::slice::from_raw_parts(self.address, self.len) }
    }
}

/// The first four bytes; `None` when a NUL comes earlier (text that short).
///
/// # Safety
/// A NUL-ended string or at least four bytes are readable.
unsafe fn magic(address: *const u8) -> Option<u32> {
    let mut word = [0u8; 4];
    for (i, byte) in word.iter_mut().enumerate() {
        // SAFETY: no earlier byte was a NUL, or the kind of image has a header of more than four bytes.
        *byte = unsafe { address.add(i).read() };
        if *byte == 0 {
            return None;
        }
    }
    Some(u32::from_le_bytes(word))
}

/// # Safety
/// `N` bytes are readable.
unsafe fn bytes<const N: usize>(address: *const u8) -> [u8; N] {
    // SAFETY: the caller's promise; an array of bytes has no alignment.
    unsafe { address.cast::<[u8; N]>().read_unaligned() }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u16_at(bytes, at) as u32 | (u16_at(bytes, at + 2) as u32) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u32_at(bytes, at) as u64 | (u32_at(bytes, at + 4) as u64) << 32
}

/// Header and payload.
fn fatbin_len(header: &[u8; 16]) -> Option<u64> {
    let header_len = u16_at(header, 6) as u64;
    if header_len < 16 {
        return None;
    }
    header_len.checked_add(u64_at(header, 8))
}

/// The furthest end of section table, segment table, sections and segments.
///
/// # Safety
/// `address` leads to an ELF file in memory, whole as far as its headers say.
unsafe fn elf_len(address: *const u8) -> Option<u64> {
    // SAFETY: an ELF file begins with its header.
    let header = unsafe { bytes::<ELF_HEADER>(address) };
    // 64-bit, little-endian.
    if header[4] != 2 || header[5] != 1 {
        return None;
    }
    let (segments, sections) = (u64_at(&header, 32), u64_at(&header, 40));
    let (segment_len, segment_count) = (u16_at(&header, 54) as u64, u16_at(&header, 56) as u64);
    let (section_len, section_count) = (u16_at(&header, 58) as u64, u16_at(&header, 60) as u64);
    let table = |start: u64, entry: u64, count: u64, least: usize| -> Option<u64> {
        if count > 0 && (entry < least as u64 || start < ELF_HEADER as u64) {
            return None;
        }
        start
            .checked_add(entry * count)
            .filter(|end| *end <= LONGEST)
    };
    let mut end = ELF_HEADER as u64;
    if segment_count > 0 {
        end = end.max(table(segments, segment_len, segment_count, ELF_SEGMENT)?);
    }
    if section_count > 0 {
        end = end.max(table(sections, section_len, section_count, ELF_SECTION)?);
    }
    for i in 0..section_count {
        // SAFETY: inside the section table, which is part of the file.
        let section =
            unsafe { bytes::<ELF_SECTION>(address.add((sections + i * section_len) as usize)) };
        if u32_at(&section, 4) != ELF_NOBITS {
            end = end.max(u64_at(&section, 24).checked_add(u64_at(&section, 32))?);
        }
    }
    for i in 0..segment_count {
        // SAFETY: inside the segment table, which is part of the file.
        let segment =
            unsafe { bytes::<ELF_SEGMENT>(address.add((segments + i * segment_len) as usize)) };
        end = end.max(u64_at(&segment, 8).checked_add(u64_at(&segment, 32))?);
    }
    Some(end)
}

/// Whether the tables that an ELF header names lie inside the file.
fn tables_inside(file: &[u8]) -> bool {
    let ends = [(32, 54, 56), (40, 58, 60)].map(|(start, entry, count)| {
        let len = u16_at(file, entry) as u64 * u16_at(file, count) as u64;
        u64_at(file, start).checked_add(len)
    });
    ends.into_iter()
        .all(|end| end.is_some_and(|end| end <= file.len() as u64))
}

/// Length of PTX with its NUL. `None` for anything but text, whose length would be meaningless.
///
/// # Safety
/// `address` leads to a NUL-ended string.
unsafe fn text_len(address: *const u8) -> Option<u64> {
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(address.cast()) }.to_bytes();
    let is_text = |byte: &u8| *byte >= 0x20 || matches!(byte, b'\t' | b'\n' | b'\r' | 0x0b | 0x0c);
    (!text.is_empty() && text.iter().take(64).all(is_text)).then_some(text.len() as u64 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn len_of(image: &[u8]) -> Status<usize> {
        // SAFETY: the tests' images hold as much as their headers say.
        unsafe { Image::find(image.as_ptr()) }.map(|image| image.len)
    }

    fn fatbin(payload: u64) -> Vec<u8> {
        let mut image = FATBIN_MAGIC.to_le_bytes().to_vec();
        image.extend(1u16.to_le_bytes());
        image.extend(16u16.to_le_bytes());
        image.extend(payload.to_le_bytes());
        image.resize(16 + payload.min(64) as usize, 0xff);
        image
    }

    #[test]
    fn text_ends_with_its_nul() {
        assert_eq!(len_of(b".version 8.0\n\0tail"), Ok(14));
        assert_eq!(len_of(b"\0"), Err(CUDA_ERROR_INVALID_IMAGE));
        assert_eq!(len_of(b"\x01\x02\x03\x04\0"), Err(CUDA_ERROR_INVALID_IMAGE));
        // SAFETY: null is refused.
        let null = unsafe { Image::find(std::ptr::null()) };
        assert!(matches!(null, Err(CUDA_ERROR_INVALID_VALUE)));
    }

    #[test]
    fn a_fatbin_says_its_length_with_and_without_a_wrapper() {
        let image = fatbin(40);
        assert_eq!(len_of(&image), Ok(56));
        for (version, expected) in [
            (1u32, Ok(56)),
            (2, Ok(56)),
            (3, Err(CUDA_ERROR_INVALID_IMAGE)),
        ] {
            let mut wrapper = WRAPPER_MAGIC.to_le_bytes().to_vec();
            wrapper.extend(version.to_le_bytes());
            wrapper.extend((image.as_ptr() as u64).to_le_bytes());
            wrapper.extend(0u64.to_le_bytes());
            assert_eq!(len_of(&wrapper), expected, "version {version}");
        }
        assert_eq!(len_of(&fatbin(u64::MAX)), Err(CUDA_ERROR_INVALID_IMAGE));
        assert_eq!(len_of(&fatbin(1 << 40)), Err(CUDA_ERROR_INVALID_IMAGE));
    }

    #[test]
    fn an_elf_ends_where_its_last_part_ends() {
        let mut image = vec![0u8; 64 + 2 * 64];
        image[..6].copy_from_slice(b"\x7fELF\x02\x01");
        image[40..48].copy_from_slice(&64u64.to_le_bytes());
        image[58..60].copy_from_slice(&64u16.to_le_bytes());
        image[60..62].copy_from_slice(&2u16.to_le_bytes());
        assert_eq!(len_of(&image), Ok(192));
        let section = 64 + 64;
        image[section + 24..section + 32].copy_from_slice(&1000u64.to_le_bytes());
        image[section + 32..section + 40].copy_from_slice(&24u64.to_le_bytes());
        assert_eq!(len_of(&image), Ok(1024));
        image[section + 4..section + 8].copy_from_slice(&ELF_NOBITS.to_le_bytes());
        assert_eq!(len_of(&image), Ok(192));
        image[section + 4..section + 8].copy_from_slice(&1u32.to_le_bytes());
        image[section + 24..section + 32].copy_from_slice(&u64::MAX.to_le_bytes());
        assert_eq!(len_of(&image), Err(CUDA_ERROR_INVALID_IMAGE));
        image[58..60].copy_from_slice(&8u16.to_le_bytes());
        assert_eq!(len_of(&image), Err(CUDA_ERROR_INVALID_IMAGE));
    }
}
