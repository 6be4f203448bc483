//! Options of loads and links (`CUjit_option`) that a program passes, and the values returned to it.
//!
//! Numbers are sent as they are, lists of names and addresses with their content; logs, times and sizes come back with the
//! answer and are written to the program's buffers.

use std::ffi::{c_char, c_void};

use mpsshim_api::cuda::*;
use mpsshim_proto::message::image::{MAX_LOG, MAX_OPTIONS};
use mpsshim_proto::message::{ImageLoaded, JitOption};
use zerocopy::{FromBytes, IntoBytes};

use crate::ffi::{In, Out, Status, Text};

/// Entries of one list.
const MAX_ENTRIES: usize = 1024;

/// The options of a call: names, values and their count, as the program gave them.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    names: In<u32>,
    values: Out<*mut c_void>,
    count: u32,
}

/// No options.
pub const NO_OPTIONS: Options = Options {
    names: In::none(),
    values: Out::none(),
    count: 0,
};

/// Output of a compiler or linker.
#[derive(Debug, Default)]
pub struct Said {
    head: ImageLoaded,
    info_log: Vec<u8>,
    error_log: Vec<u8>,
}

impl Said {
    /// Reads an answer; one that is too short counts as empty.
    pub fn read(payload: &[u8]) -> Said {
        let Ok((head, logs)) = ImageLoaded::read_from_prefix(payload) else {
            return Said::default();
        };
        let info = (head.info_log as usize).min(logs.len());
        let error = (head.error_log as usize).min(logs.len() - info);
        Said {
            head,
            info_log: logs[..info].to_vec(),
            error_log: logs[info..info + error].to_vec(),
        }
    }
    /// Bytes of the memory for managed variables that a load lacks.
    pub fn managed(&self) -> u64 {
        self.head.managed
    }
    /// Bytes of a linked cubin.
    pub fn cubin(&self) -> u64 {
        self.head.cubin
    }
}

/// Options in the form in which they travel.
#[derive(Debug, Default)]
pub struct Parsed {
    /// How many there are.
    pub count: u32,
    /// The options, then their lists.
    pub bytes: Vec<u8>,
    /// Bytes of logs wanted.
    pub info_log: u32,
    pub error_log: u32,
    /// Where results go.
    pub places: Places,
}

/// Destinations of a call's results. A linker's stay in use until it is destroyed, as CUDA documents.
#[derive(Clone, Copy, Debug)]
pub struct Places {
    values: Out<*mut c_void>,
    info: Log,
    error: Log,
    wall_time_at: Option<usize>,
    threads_at: Option<usize>,
}

// SAFETY: addresses in the program's memory, which is written only in the calls that the program makes for it.
unsafe impl Send for Places {}

impl Default for Places {
    fn default() -> Places {
        Places {
            values: Out::none(),
            info: Log::default(),
            error: Log::default(),
            wall_time_at: None,
            threads_at: None,
        }
    }
}

/// Destination of a log.
#[derive(Clone, Copy, Debug, Default)]
struct Log {
    buffer: Option<*mut u8>,
    len: u32,
    /// Position of the option that holds the buffer's length and receives the log's.
    len_at: Option<usize>,
}

impl Log {
    /// A buffer and its length come together.
    fn check(&self) -> Status {
        match (self.buffer, self.len_at) {
            (None, None) => Ok(()),
            (Some(buffer), Some(_)) if !buffer.is_null() => Ok(()),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }

    fn wanted(&self) -> u32 {
        match self.buffer {
            Some(buffer) if !buffer.is_null() => self.len.min(MAX_LOG),
            _ => 0,
        }
    }

    fn write(self, text: &[u8], size: u32, values: Out<*mut c_void>) -> Status {
        let Some(buffer) = self.buffer.filter(|_| self.wanted() > 0) else {
            return Ok(());
        };
        // One byte stays for the NUL.
        let len = text.len().min(self.len as usize - 1);
        // SAFETY: the program gave a buffer of `self.len` bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), buffer, len);
            buffer.add(len).write(0);
        }
        match self.len_at {
            Some(at) => values.set_at(at, size as usize as *mut c_void),
            None => Ok(()),
        }
    }
}

impl Places {
    /// Writes the output to the program's variables.
    pub fn write(&self, said: &Said) -> Status {
        let head = &said.head;
        self.info
            .write(&said.info_log, head.info_size, self.values)?;
        self.error
            .write(&said.error_log, head.error_size, self.values)?;
        if let Some(at) = self.wall_time_at {
            let bits = head.wall_time_ms.to_bits() as usize;
            self.values.set_at(at, bits as *mut c_void)?;
        }
        if let Some(at) = self.threads_at {
            let threads = head.threads_per_block as usize;
            self.values.set_at(at, threads as *mut c_void)?;
        }
        Ok(())
    }
}

impl Options {
    /// The options that a program passes.
    pub fn new(count: u32, names: In<u32>, values: Out<*mut c_void>) -> Options {
        Options {
            names,
            values,
            count,
        }
    }

    fn number(&self, wanted: u32) -> Status<Option<usize>> {
        for at in 0..self.count as usize {
            if self.names.at(at)? == wanted {
                return Ok(Some(self.values.get_at(at)? as usize));
            }
        }
        Ok(None)
    }

    /// Whether one of these is among them.
    pub fn has(&self, wanted: &[u32]) -> Status<bool> {
        for at in 0..self.count.min(MAX_OPTIONS) as usize {
            if wanted.contains(&self.names.at(at)?) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Reads the options.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for an unknown option, or a list without its length.
    pub fn parse(self) -> Status<Parsed> {
        if self.count > MAX_OPTIONS {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let mut parsed = Parsed {
            places: Places {
                values: self.values,
                ..Places::default()
            },
            ..Parsed::default()
        };
        let mut lists = Vec::new();
        for at in 0..self.count as usize {
            let option = self.names.at(at)?;
            let value = self.values.get_at(at)?;
            let places = &mut parsed.places;
            let mut len = 0;
            let mut number = value as u64;
            match option {
                CU_JIT_WALL_TIME => places.wall_time_at = Some(at),
                CU_JIT_INFO_LOG_BUFFER => places.info.buffer = Some(value.cast()),
                CU_JIT_ERROR_LOG_BUFFER => places.error.buffer = Some(value.cast()),
                CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES => {
                    (places.info.len, places.info.len_at) = (value as usize as u32, Some(at));
                }
                CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES => {
                    (places.error.len, places.error.len_at) = (value as usize as u32, Some(at));
                }
                // They travel with their lists.
                CU_JIT_GLOBAL_SYMBOL_COUNT
                | CU_JIT_REFERENCED_KERNEL_COUNT
                | CU_JIT_REFERENCED_VARIABLE_COUNT => {}
                CU_JIT_NUM_OPTIONS.. => return Err(CUDA_ERROR_INVALID_VALUE),
                _ => {
                    if option == CU_JIT_THREADS_PER_BLOCK {
                        places.threads_at = Some(at);
                    }
                    if let Some((counted_by, addresses)) = list(option) {
                        let entries = self.number(counted_by)?.unwrap_or(0);
                        let before = lists.len();
                        // SAFETY: the program's list, as long as it said.
                        unsafe { read_list(value, entries, addresses, &mut lists)? };
                        (len, number) = ((lists.len() - before) as u32, entries as u64);
                    }
                    let option = JitOption {
                        option,
                        len,
                        value: number,
                    };
                    parsed.bytes.extend_from_slice(option.as_bytes());
                    parsed.count += 1;
                }
            }
        }
        parsed.places.info.check()?;
        parsed.places.error.check()?;
        parsed.bytes.extend_from_slice(&lists);
        parsed.info_log = parsed.places.info.wanted();
        parsed.error_log = parsed.places.error.wanted();
        Ok(parsed)
    }
}

/// The option that holds the length of an option's list, and whether the list is of addresses (else of names).
fn list(option: u32) -> Option<(u32, bool)> {
    match option {
        CU_JIT_GLOBAL_SYMBOL_NAMES => Some((CU_JIT_GLOBAL_SYMBOL_COUNT, false)),
        CU_JIT_GLOBAL_SYMBOL_ADDRESSES => Some((CU_JIT_GLOBAL_SYMBOL_COUNT, true)),
        CU_JIT_REFERENCED_KERNEL_NAMES => Some((CU_JIT_REFERENCED_KERNEL_COUNT, false)),
        CU_JIT_REFERENCED_VARIABLE_NAMES => Some((CU_JIT_REFERENCED_VARIABLE_COUNT, false)),
        _ => None,
    }
}

/// # Safety
/// `pointer` is null or leads to `entries` pointers, which lead to NUL-ended names unless they are plain addresses.
unsafe fn read_list(
    pointer: *mut c_void,
    entries: usize,
    addresses: bool,
    bytes: &mut Vec<u8>,
) -> Status {
    if entries > MAX_ENTRIES || (entries > 0 && pointer.is_null()) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    for index in 0..entries {
        // SAFETY: the caller's promise.
        let entry = unsafe { pointer.cast::<*const c_char>().add(index).read() };
        if addresses {
            bytes.extend_from_slice(&(entry as u64).to_le_bytes());
        } else {
            // SAFETY: the caller's promise.
            let name = unsafe { Text::from_address(entry) };
            bytes.extend_from_slice(name.get()?.to_bytes_with_nul());
        }
    }
    if bytes.len() > mpsshim_proto::ring::MAX_MESSAGE as usize / 4 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options<'a>(names: &'a [u32], values: &'a mut [*mut c_void]) -> Options {
        // SAFETY: both types have the layout of a pointer to their elements.
        unsafe {
            Options::new(
                names.len() as u32,
                std::mem::transmute::<*const u32, In<u32>>(names.as_ptr()),
                std::mem::transmute::<*mut *mut c_void, Out<*mut c_void>>(values.as_mut_ptr()),
            )
        }
    }

    #[test]
    fn logs_and_numbers() {
        let mut log = [b'#'; 8];
        let names = [
            CU_JIT_ERROR_LOG_BUFFER,
            CU_JIT_OPTIMIZATION_LEVEL,
            CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
            CU_JIT_WALL_TIME,
        ];
        let mut values = [
            log.as_mut_ptr().cast(),
            3 as *mut c_void,
            4 as *mut c_void,
            std::ptr::null_mut(),
        ];
        let parsed = options(&names, &mut values).parse().unwrap();
        assert_eq!((parsed.count, parsed.info_log, parsed.error_log), (1, 0, 4));
        let head = ImageLoaded {
            error_log: 6,
            error_size: 7,
            wall_time_ms: 1.5,
            ..ImageLoaded::default()
        };
        let answer = [head.as_bytes(), b"no way"].concat();
        parsed.places.write(&Said::read(&answer)).unwrap();
        assert_eq!(&log, b"no \0####");
        assert_eq!(values[2] as usize, 7);
        assert_eq!(values[3] as usize, 1.5f32.to_bits() as usize);
    }

    #[test]
    fn a_list_travels_as_its_content() {
        let (a, b) = (c"first", c"second");
        let mut list = [a.as_ptr(), b.as_ptr()];
        let names = [
            CU_JIT_REFERENCED_KERNEL_NAMES,
            CU_JIT_REFERENCED_KERNEL_COUNT,
        ];
        let mut values = [list.as_mut_ptr().cast(), 2 as *mut c_void];
        let parsed = options(&names, &mut values).parse().unwrap();
        assert_eq!(parsed.count, 1);
        assert!(parsed.bytes.ends_with(b"first\0second\0"));
        let mut values = [std::ptr::null_mut(), 2 as *mut c_void];
        assert!(options(&names, &mut values).parse().is_err());
    }
}
