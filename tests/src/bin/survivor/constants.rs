//! Variables of a module without code, which kernels of another module reach by their addresses.

use crate::{Status, load_library, run_one};
use mpsshim_api::cuda::*;
use mpsshim_proto::arena::is_device;
use mpsshim_tests::cu;
use mpsshim_tests::peer::{data_ptx, take_ptx};
use std::ffi::{CStr, CString, c_void};

/// Words of the variable that is filled once.
const WEIGHTS: usize = 1 << 14;

pub struct Constants {
    data: CUmodule,
    take: CUfunction,
    stream: CUstream,
    weights: CUdeviceptr,
    limits: CUdeviceptr,
    out: CUdeviceptr,
    rounds: u32,
}

fn module(text: &str) -> Status<CUmodule> {
    let image = CString::new(text).expect("no NUL");
    let mut module = CUmodule::NULL;
    cu!(cuModuleLoadData, &mut module, image.as_ptr()).ok()?;
    Ok(module)
}

fn place(module: CUmodule, name: &CStr, expected: usize) -> Status<CUdeviceptr> {
    let (mut place, mut len): (CUdeviceptr, usize) = (0, 0);
    let name = name.as_ptr();
    cu!(cuModuleGetGlobal_v2, &mut place, &mut len, module, name).ok()?;
    assert_eq!(len, expected);
    Ok(place)
}

fn words<const N: usize>(from: CUdeviceptr) -> Status<[u32; N]> {
    let mut found = [0; N];
    cu!(cuMemcpyDtoH_v2, found.as_mut_ptr(), from, 4 * N).ok()?;
    Ok(found)
}

fn attribute(which: CUpointer_attribute, address: CUdeviceptr) -> Result<u64, CUresult> {
    let mut value = 0u64;
    let out: *mut c_void = (&raw mut value).cast();
    cu!(cuPointerGetAttribute, out, which, address).ok()?;
    Ok(value)
}

/// The range that an address lies in, as the driver says.
fn range(address: CUdeviceptr) -> Result<(CUdeviceptr, usize), CUresult> {
    let (mut start, mut len) = (0, 0);
    cu!(cuMemGetAddressRange_v2, &mut start, &mut len, address).ok()?;
    Ok((start, len))
}

/// Whether a program sees a variable there, and not memory that it has allocated.
fn looks_like_a_variable(start: CUdeviceptr, len: usize) -> Status<bool> {
    let inside = start + 4;
    let memory_type = attribute(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, inside)?;
    let mut handle = CUipcMemHandle([0; 64]);
    let shared = cu!(cuIpcGetMemHandle, &mut handle, start);
    let behind = start + len as u64;
    let mut word = 0u32;
    let beyond = cu!(cuMemcpyDtoH_v2, &raw mut word, behind - 2, 4usize);
    Ok(memory_type == u64::from(CU_MEMORYTYPE_DEVICE)
        && attribute(CU_POINTER_ATTRIBUTE_DEVICE_POINTER, inside)? == inside
        && attribute(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, inside)? == start
        && attribute(CU_POINTER_ATTRIBUTE_RANGE_SIZE, inside)? == len as u64
        && attribute(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, inside)? == 0
        && range(inside)? == (start, len)
        && [shared, beyond] == [CUDA_ERROR_INVALID_VALUE; 2]
        && cu!(cuMemFree_v2, start) == CUDA_ERROR_INVALID_VALUE
        && cu!(cuMemFreeAsync, start, CUstream::NULL) == CUDA_ERROR_INVALID_VALUE)
}

impl Constants {
    pub fn new() -> Status<Constants> {
        let mut stream = CUstream::NULL;
        cu!(cuStreamCreate, &mut stream, CU_STREAM_NON_BLOCKING).ok()?;
        let data = module(&data_ptx(WEIGHTS))?;
        let code = module(take_ptx())?;
        let mut take = CUfunction::NULL;
        cu!(cuModuleGetFunction, &mut take, code, c"take".as_ptr()).ok()?;
        let mut out: CUdeviceptr = 0;
        cu!(cuMemAlloc_v2, &mut out, 4usize).ok()?;
        let weights = place(data, c"weights", 4 * WEIGHTS)?;
        let limits = place(data, c"limits", 8)?;
        assert_eq!(words::<WEIGHTS>(weights)?, [0; WEIGHTS]);
        assert_eq!(words(limits)?, [7, 9]);
        let content: Vec<u32> = (0..WEIGHTS as u32).collect();
        cu!(cuMemcpyHtoD_v2, weights, content.as_ptr(), 4 * WEIGHTS).ok()?;
        // A copy of pageable memory returns when its source has been read; the other stream does not wait for it.
        cu!(cuCtxSynchronize).ok()?;
        Ok(Constants {
            data,
            take,
            stream,
            weights,
            limits,
            out,
            rounds: 0,
        })
    }

    /// As often a kernel has counted in the variables; `None`: something is not as it should be.
    pub fn round(&mut self) -> Status<Option<u32>> {
        let at = self.rounds % WEIGHTS as u32;
        self.rounds += 1;
        let word = self.weights + 4 * u64::from(at);
        for (address, expected) in [(word, at), (self.limits, 6 + self.rounds)] {
            run_one(self.take, self.stream, &mut [self.out, address])?;
            cu!(cuStreamSynchronize, self.stream).ok()?;
            if words(self.out)? != [expected] || words(address)? != [expected + 1] {
                return Ok(None);
            }
        }
        let rest = words::<WEIGHTS>(self.weights)?;
        let mut rest = rest.iter().zip(0..).skip(self.rounds as usize);
        let right = rest.all(|(found, expected)| *found == expected)
            && place(self.data, c"weights", 4 * WEIGHTS)? == self.weights
            && looks_like_a_variable(self.weights, 4 * WEIGHTS)?
            && looks_like_a_variable(self.limits, 8)?
            && self.ends_with_its_module()?
            && Constants::ends_with_its_library()?
            && Constants::ends_with_its_context()?;
        if !right {
            // A lost context has another status than the expected ones, too.
            cu!(cuCtxSynchronize).ok()?;
        }
        Ok(right.then_some(self.rounds))
    }

    /// Uses a variable of 8 MiB; where it is.
    pub fn large() -> Status<&'static str> {
        const WORDS: usize = 2 << 20;
        let data = module(&data_ptx(WORDS))?;
        let start = place(data, c"weights", 4 * WORDS)?;
        cu!(cuMemsetD32_v2, start + 8, 5u32, 1usize).ok()?;
        assert_eq!(words(start)?, [0, 0, 5, 0]);
        assert!(looks_like_a_variable(start, 4 * WORDS)?);
        Ok(match is_device(start) {
            true => "in memory of the program",
            false => "in the image",
        })
    }

    /// Launches a kernel that counts in a variable, and does not wait for it.
    pub fn launch(&self) -> Status {
        run_one(self.take, self.stream, &mut [self.out, self.limits + 4])
    }

    /// Another load has variables of its own, which end with it.
    fn ends_with_its_module(&self) -> Status<bool> {
        let other = module(&data_ptx(WEIGHTS))?;
        let weights = place(other, c"weights", 4 * WEIGHTS)?;
        let limits = place(other, c"limits", 8)?;
        let is_new = weights != self.weights
            && words::<WEIGHTS>(weights)? == [0; WEIGHTS]
            && words(limits)? == [7, 9];
        cu!(cuMemsetD32_v2, weights, 5u32, WEIGHTS).ok()?;
        cu!(cuModuleUnload, other).ok()?;
        Ok(is_new && range(weights) == Err(CUDA_ERROR_NOT_FOUND))
    }

    fn ends_with_its_library() -> Status<bool> {
        let image = CString::new(data_ptx(4)).expect("no NUL");
        let library = load_library(&image)?;
        let (mut limits, mut len): (CUdeviceptr, usize) = (0, 0);
        let name = c"limits".as_ptr();
        cu!(cuLibraryGetGlobal, &mut limits, &mut len, library, name).ok()?;
        let is_right = words(limits)? == [7, 9] && looks_like_a_variable(limits, len)?;
        cu!(cuLibraryUnload, library).ok()?;
        Ok(is_right && is_device(limits) && range(limits) == Err(CUDA_ERROR_NOT_FOUND))
    }

    fn ends_with_its_context() -> Status<bool> {
        let (mut own, mut popped) = (CUcontext::NULL, CUcontext::NULL);
        cu!(cuCtxCreate_v2, &mut own, 0u32, 0 as CUdevice).ok()?;
        let limits = place(module(&data_ptx(4))?, c"limits", 8)?;
        let context = attribute(CU_POINTER_ATTRIBUTE_CONTEXT, limits)?;
        let is_right = words(limits)? == [7, 9] && context == own.0;
        cu!(cuCtxPopCurrent_v2, &mut popped).ok()?;
        cu!(cuCtxDestroy_v2, own).ok()?;
        Ok(is_right && is_device(limits) && range(limits) == Err(CUDA_ERROR_NOT_FOUND))
    }
}
