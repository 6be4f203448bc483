//! Common to all exported functions: the macros that define them, arguments from C, the log.

use std::ffi::{CStr, c_char};
use std::sync::OnceLock;

use mpsshim_api::cuda::*;

pub type R<T> = Result<T, CUresult>;

/// The address of an exported function.
#[derive(Clone, Copy)]
pub struct Entry(pub *const ());
// SAFETY: an address of code, which never changes.
unsafe impl Sync for Entry {}
// SAFETY: as above.
unsafe impl Send for Entry {}

/// Exports functions under their own names; a body gives `R<()>`. All of them are listed in `$table`.
macro_rules! api {
    ($table:ident; $(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {
        $(
            #[unsafe(no_mangle)]
            pub extern "C" fn $name($($arg: $ty),*) -> CUresult {
                let run = move || -> $crate::api::R<()> { $body };
                $crate::api::status(stringify!($name), run())
            }
        )*
        pub static $table: &[(&str, $crate::api::Entry)] =
            &[$((stringify!($name), $crate::api::Entry($name as *const ()))),*];

        #[cfg(test)]
        #[expect(non_snake_case, reason = "the table's name")]
        pub mod $table {
            #[allow(unused_imports, reason = "the types of the arguments")]
            use super::*;

            pub fn signatures() -> Vec<mpsshim_signatures::Named> {
                vec![$((stringify!($name), mpsshim_signatures::signature!($($ty),*))),*]
            }
        }
    };
}

/// As `api!`, for functions of which there are two: the second takes the NULL stream as the calling
/// thread's default stream, and `$own` says which one was called.
macro_rules! api_streams {
    ($table:ident; $(fn $name:ident / $second:ident [$own:ident] ($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {
        $(
            #[unsafe(no_mangle)]
            pub extern "C" fn $name($($arg: $ty),*) -> CUresult {
                let run = move |$own: bool| -> $crate::api::R<()> { $body };
                $crate::api::status(stringify!($name), run(false))
            }
            #[unsafe(no_mangle)]
            pub extern "C" fn $second($($arg: $ty),*) -> CUresult {
                let run = move |$own: bool| -> $crate::api::R<()> { $body };
                $crate::api::status(stringify!($second), run(true))
            }
        )*
        pub static $table: &[(&str, $crate::api::Entry)] = &[$(
            (stringify!($name), $crate::api::Entry($name as *const ())),
            (stringify!($second), $crate::api::Entry($second as *const ())),
        )*];

        #[cfg(test)]
        #[expect(non_snake_case, reason = "the table's name")]
        pub mod $table {
            #[allow(unused_imports, reason = "the types of the arguments")]
            use super::*;

            pub fn signatures() -> Vec<mpsshim_signatures::Named> {
                vec![$(
                    (stringify!($name), mpsshim_signatures::signature!($($ty),*)),
                    (stringify!($second), mpsshim_signatures::signature!($($ty),*)),
                )*]
            }
        }
    };
}
pub(crate) use {api, api_streams};

pub fn logging() -> bool {
    static ON: OnceLock<bool> = OnceLock::new();
    *ON.get_or_init(|| std::env::var_os("SOFTGPU_LOG").is_some_and(|v| !v.is_empty() && v != "0"))
}

/// Writes a line to standard error when `SOFTGPU_LOG` is set.
pub fn log(line: impl FnOnce() -> String) {
    if logging() {
        eprintln!("softgpu: {}", line());
    }
}

pub fn status(name: &str, result: R<()>) -> CUresult {
    let status = result.err().unwrap_or(CUDA_SUCCESS);
    if !status.is_ok() && status != CUDA_ERROR_NOT_READY {
        log(|| format!("{name}: {status}"));
    }
    status
}

/// A pointer of the caller's through which a result goes out.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Out<T>(*mut T);

impl<T> Out<T> {
    pub fn set(self, value: T) -> R<()> {
        if self.0.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        self.put(value);
        Ok(())
    }
    /// Sets what the caller may leave out.
    pub fn put(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: by the driver API's contract a pointer that is not NULL has room for the result.
            unsafe { self.0.write_unaligned(value) }
        }
    }
    pub const NOWHERE: Self = Out(std::ptr::null_mut());
    pub fn to(address: u64) -> Self {
        Out(address as *mut T)
    }
    pub fn is_null(&self) -> bool {
        self.0.is_null()
    }
    pub fn address(self) -> u64 {
        self.0 as u64
    }
    pub fn at(self, index: usize) -> Self {
        if self.0.is_null() {
            self
        } else {
            Out(self.0.wrapping_add(index))
        }
    }
    /// The value that stands there, for arguments that go both ways.
    pub fn get(self) -> R<T>
    where
        T: Copy,
    {
        In(self.0.cast_const()).get(0)
    }
}

/// A pointer of the caller's to values that are read.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct In<T>(pub *const T);

impl<T: Copy> In<T> {
    pub fn get(self, index: usize) -> R<T> {
        if self.0.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: by the driver API's contract the array has as many values as the caller says.
        Ok(unsafe { self.0.wrapping_add(index).read_unaligned() })
    }
    pub fn list(self, count: usize) -> R<Vec<T>> {
        (0..count).map(|n| self.get(n)).collect()
    }
    pub fn is_null(&self) -> bool {
        self.0.is_null()
    }
}

/// A NUL-terminated string of the caller's.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Text(*const c_char);

impl Text {
    pub fn get(self) -> R<String> {
        if self.0.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: by the driver API's contract the string ends with a NUL.
        let text = unsafe { CStr::from_ptr(self.0) };
        text.to_str()
            .map(str::to_owned)
            .map_err(|_| CUDA_ERROR_INVALID_VALUE)
    }
}

/// Puts `text` into a buffer of the caller's, cut to fit and NUL-terminated.
pub fn put_text(to: Out<u8>, room: usize, text: &str) -> R<()> {
    if to.is_null() || room == 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let length = text.len().min(room - 1);
    for (n, byte) in text.as_bytes()[..length].iter().chain(&[0]).enumerate() {
        to.at(n).put(*byte);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{In, Out, Text};
    use mpsshim_signatures::{Class, Passed, differences, pointer};

    /// Values are read and written wherever they are.
    fn unaligned(class: Class) -> Class {
        match class {
            Class::Pointer { writable, to } => Class::Pointer {
                writable,
                to: to.map(|(size, _)| (size, 1)),
            },
            other => other,
        }
    }

    impl<T: 'static> Passed for In<T> {
        fn class() -> Class {
            unaligned(pointer::<T>(false))
        }
    }

    impl<T: 'static> Passed for Out<T> {
        fn class() -> Class {
            unaligned(pointer::<T>(true))
        }
    }

    impl Passed for Text {
        fn class() -> Class {
            pointer::<u8>(false)
        }
    }

    #[test]
    fn functions_have_the_signatures_of_the_driver() {
        let found = differences(crate::lookup::signatures());
        assert!(found.is_empty(), "{}", found.join("\n"));
    }
}
