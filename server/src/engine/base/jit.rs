//! Options of the driver's compiler and linker, in the forms of the messages and of the driver.

use mpsshim_api::cuda::*;
use mpsshim_proto::message::image::{MAX_LOG, MAX_OPTIONS};
use mpsshim_proto::message::{ImageLoaded, JitOption};
use std::ffi::c_void;
use zerocopy::{FromBytes, IntoBytes};

/// Options with a numeric value, which can be passed on from the client. The other options are pointers, which the
/// driver would dereference, and options that accompany them.
const NUMBERS: &[u32] = &[
    0, 1, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 20, 21, 22, 23, 24, 29, 30, 31, 32, 33, 34,
];
/// List options, each with the option that gives its number of entries.
const LISTS: [(u32, u32); 4] = [
    (CU_JIT_GLOBAL_SYMBOL_NAMES, CU_JIT_GLOBAL_SYMBOL_COUNT),
    (CU_JIT_GLOBAL_SYMBOL_ADDRESSES, CU_JIT_GLOBAL_SYMBOL_COUNT),
    (
        CU_JIT_REFERENCED_KERNEL_NAMES,
        CU_JIT_REFERENCED_KERNEL_COUNT,
    ),
    (
        CU_JIT_REFERENCED_VARIABLE_NAMES,
        CU_JIT_REFERENCED_VARIABLE_COUNT,
    ),
];

/// Options in the driver's form, with all memory they point to. The driver keeps using a link's options until the link
/// is destroyed.
#[derive(Debug, Default)]
pub struct JitOptions {
    names: Vec<u32>,
    values: Vec<u64>,
    info: Vec<u8>,
    error: Vec<u8>,
    /// The lists, and the texts to which lists of names point.
    lists: Vec<Vec<u64>>,
    texts: Vec<Vec<u8>>,
    /// An option's value must not reach the driver: it divides by the number of threads, and crashes if that is zero
    /// (580.159.04).
    refused: bool,
}

/// Spare bytes after a log: the driver writes a NUL even into a log of 0 bytes.
const BEYOND: usize = 64;

impl JitOptions {
    /// Parses `count` options and the lists after them. Also returns the remaining bytes.
    ///
    /// # Errors
    /// A description of the violation, which ends the session.
    pub fn read(bytes: &[u8], count: u32) -> Result<(JitOptions, &[u8]), String> {
        let count = count as usize;
        if count > MAX_OPTIONS as usize {
            return Err(format!("{count} load options"));
        }
        let (heads, mut rest) = bytes
            .split_at_checked(count * size_of::<JitOption>())
            .ok_or("load options do not fit the message")?;
        let mut this = JitOptions::default();
        for head in heads.chunks_exact(size_of::<JitOption>()) {
            let head = JitOption::read_from_bytes(head).map_err(|_| "a load option cut off")?;
            let (list, behind) = rest
                .split_at_checked(head.len as usize)
                .ok_or("a list of load options does not fit the message")?;
            rest = behind;
            match LISTS.iter().find(|(option, _)| *option == head.option) {
                Some((option, counted_by)) => {
                    let entries = if *option == CU_JIT_GLOBAL_SYMBOL_ADDRESSES {
                        this.addresses(list)
                    } else {
                        this.texts(list)
                    };
                    if entries != head.value {
                        return Err(format!("a list of {entries} instead of {}", head.value));
                    }
                    if this.names.contains(option) {
                        return Err(format!("option {option} twice"));
                    }
                    let address = this.lists.last().map_or(0, |list| list.as_ptr() as u64);
                    this.push(*option, address);
                    if !this.names.contains(counted_by) {
                        this.push(*counted_by, entries);
                    } else if this.value(*counted_by) != entries {
                        // The driver reads the same number of entries from each list that shares a count.
                        return Err(format!("lists of {entries} and of another length"));
                    }
                }
                None if NUMBERS.contains(&head.option) => {
                    this.refused |= head.option == CU_JIT_THREADS_PER_BLOCK && head.value == 0;
                    this.push(head.option, head.value);
                }
                None => {}
            }
        }
        // The driver reads both lists with one count, but only one would be present.
        this.refused |= this.names.contains(&CU_JIT_GLOBAL_SYMBOL_NAMES)
            != this.names.contains(&CU_JIT_GLOBAL_SYMBOL_ADDRESSES);
        Ok((this, rest))
    }

    fn push(&mut self, option: u32, value: u64) {
        self.names.push(option);
        self.values.push(value);
    }

    fn addresses(&mut self, list: &[u8]) -> u64 {
        let words = list.chunks_exact(8).map(|word| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(word);
            u64::from_le_bytes(bytes)
        });
        self.lists.push(words.collect());
        list.len() as u64 / 8
    }

    fn texts(&mut self, list: &[u8]) -> u64 {
        let mut pointers = Vec::new();
        for name in list.split_inclusive(|byte| *byte == 0) {
            if name.ends_with(&[0]) {
                self.texts.push(name.to_vec());
                pointers.push(self.texts.last().map_or(0, |text| text.as_ptr() as u64));
            }
        }
        let count = pointers.len() as u64;
        self.lists.push(pointers);
        count
    }

    /// Requests logs of these lengths, in bytes, and the time.
    pub fn want(&mut self, info: u32, error: u32) {
        let (info, error) = (info.min(MAX_LOG) as usize, error.min(MAX_LOG) as usize);
        self.info = vec![0; info + BEYOND];
        self.error = vec![0; error + BEYOND];
        for (at, log, buffer, size) in [
            (
                self.info.as_mut_ptr(),
                info,
                CU_JIT_INFO_LOG_BUFFER,
                CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES,
            ),
            (
                self.error.as_mut_ptr(),
                error,
                CU_JIT_ERROR_LOG_BUFFER,
                CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
            ),
        ] {
            if log > 0 {
                self.push(buffer, at as u64);
                self.push(size, log as u64);
            }
        }
        self.push(CU_JIT_WALL_TIME, 0);
    }

    /// Count, names and values in the driver's form. The driver writes results into the values.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for values that must not reach the driver.
    pub fn raw(&mut self) -> Result<(u32, *mut u32, *mut *mut c_void), CUresult> {
        if self.refused {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        Ok((
            self.names.len() as u32,
            self.names.as_mut_ptr(),
            self.values.as_mut_ptr().cast(),
        ))
    }

    fn value(&self, option: u32) -> u64 {
        let at = self.names.iter().position(|name| *name == option);
        at.map_or(0, |at| self.values[at])
    }

    /// The driver's results: [`ImageLoaded`] and the logs.
    pub fn outcome(&self, cubin: u64) -> Vec<u8> {
        let text = |log: &[u8]| log.iter().position(|byte| *byte == 0).unwrap_or(log.len());
        let (info, error) = (text(&self.info), text(&self.error));
        let head = ImageLoaded {
            info_log: info as u32,
            error_log: error as u32,
            info_size: self.value(CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES) as u32,
            error_size: self.value(CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES) as u32,
            wall_time_ms: f32::from_bits(self.value(CU_JIT_WALL_TIME) as u32),
            threads_per_block: self.value(CU_JIT_THREADS_PER_BLOCK) as u32,
            cubin,
            managed: 0,
        };
        let mut payload = head.as_bytes().to_vec();
        payload.extend_from_slice(&self.info[..info]);
        payload.extend_from_slice(&self.error[..error]);
        payload
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn option(option: u32, len: u32, value: u64) -> Vec<u8> {
        JitOption { option, len, value }.as_bytes().to_vec()
    }

    #[test]
    fn numbers_lists_and_the_rest() {
        let mut bytes = option(CU_JIT_OPTIMIZATION_LEVEL, 0, 3);
        bytes.extend(option(CU_JIT_GLOBAL_SYMBOL_NAMES, 4, 2));
        bytes.extend(option(CU_JIT_GLOBAL_SYMBOL_ADDRESSES, 16, 2));
        bytes.extend(option(CU_JIT_INFO_LOG_BUFFER, 0, 0xdead));
        bytes.extend(b"a\0b\0");
        bytes.extend([1u64, 2].as_bytes());
        bytes.extend(b"name");
        let (read, rest) = JitOptions::read(&bytes, 4).unwrap();
        assert_eq!(rest, b"name");
        // The client's pointer is not passed on; the count is taken from the lists.
        assert_eq!(read.names, [7, 17, 19, 18]);
        assert_eq!(read.value(19), 2);
        assert_eq!(read.lists[1], [1, 2]);
        assert_eq!(read.texts, [b"a\0", b"b\0"]);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        assert!(JitOptions::read(&[], u32::MAX).is_err());
        assert!(JitOptions::read(&option(7, 0, 1), 2).is_err());
        assert!(JitOptions::read(&option(17, 100, 1), 1).is_err());
        let mut bytes = option(17, 2, 9);
        bytes.extend(b"a\0");
        assert!(JitOptions::read(&bytes, 1).is_err());
        assert!(JitOptions::read(&option(18, u32::MAX, 1), 1).is_err());
    }

    /// Whether lists of these options and lengths are passed on to the driver; `None` if they are a violation.
    fn symbols(lists: &[(u32, usize)]) -> Option<bool> {
        let (mut heads, mut behind) = (Vec::new(), Vec::new());
        for &(list, entries) in lists {
            let entry: &[u8] = match list {
                CU_JIT_GLOBAL_SYMBOL_ADDRESSES => &[1; 8],
                _ => b"a\0",
            };
            let list_bytes = entry.repeat(entries);
            heads.extend(option(list, list_bytes.len() as u32, entries as u64));
            behind.extend(list_bytes);
        }
        heads.extend(behind);
        let (mut read, _) = JitOptions::read(&heads, lists.len() as u32).ok()?;
        Some(read.raw().is_ok())
    }

    #[test]
    fn lists_with_one_count_have_one_length() {
        const NAMES: u32 = CU_JIT_GLOBAL_SYMBOL_NAMES;
        const ADDRESSES: u32 = CU_JIT_GLOBAL_SYMBOL_ADDRESSES;
        assert_eq!(symbols(&[(NAMES, 2), (ADDRESSES, 2)]), Some(true));
        for (names, addresses) in [(2, 0), (0, 2), (2, 1), (1, 2)] {
            assert_eq!(symbols(&[(NAMES, names), (ADDRESSES, addresses)]), None);
            assert_eq!(symbols(&[(ADDRESSES, addresses), (NAMES, names)]), None);
        }
        assert_eq!(symbols(&[(NAMES, 2), (ADDRESSES, 2), (NAMES, 0)]), None);
        assert_eq!(symbols(&[(NAMES, 2)]), Some(false));
        assert_eq!(symbols(&[(ADDRESSES, 2)]), Some(false));
    }
}
