//! Functions and kernels: lookup, parameters, attributes.

use super::super::Shared;
use super::super::images::Raw;
use super::super::session::{Function, Session};
use super::Reply;
use mpsshim_proto::cuda::*;
use mpsshim_proto::message::image::KernelAttribute;
use mpsshim_proto::message::{
    FUNCTION_PRINTS, FunctionAttribute, FunctionInfo, GetFunction, Param, Value,
};
use mpsshim_proto::ring::Message;
use mpsshim_proto::segment::ANSWER_LEN;
use zerocopy::IntoBytes;

/// Asks for one parameter after the other until there are no more.
fn params_of(info: impl Fn(usize, &mut usize, &mut usize) -> Result<(), CUresult>) -> Vec<Param> {
    let mut params = Vec::new();
    for index in 0..MAX_PARAMS {
        let (mut offset, mut size) = (0, 0);
        if info(index, &mut offset, &mut size).is_err() {
            break;
        }
        params.push(Param {
            offset: offset as u32,
            size: size as u32,
        });
    }
    params
}

/// Parameters a kernel can have at most: one per byte of its parameter space would be 32,764.
const MAX_PARAMS: usize = 4096;

impl Session {
    /// `cuModuleGetFunction`; `cuLibraryGetKernel`, and `cuKernelGetFunction` for one device. A kernel's function is
    /// loaded here and now, on the slow lane, so that no launch has to.
    pub fn get_function(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: GetFunction = self.body(message)?;
        let name = self.name::<GetFunction>(message)?;
        let driver = &shared.driver;
        if body.function == 0 {
            return self.describe_kernel(shared, body.parent, &name);
        }
        let (image, device, prints) = self.image_ready(shared, body.parent, body.device)?;
        let mut raw = CUfunction::NULL;
        match image {
            Raw::Module(module) => {
                driver.module_get_function(&mut raw, module, name.as_ptr().cast())?
            }
            Raw::Library(library) => {
                let mut kernel = CUkernel::NULL;
                driver.library_get_kernel(&mut kernel, library, name.as_ptr().cast())?;
                driver.kernel_get_function(&mut raw, kernel)?;
            }
        }
        let mut info = FunctionInfo {
            attributes: [i32::MIN; 16],
            ..FunctionInfo::default()
        };
        for (attribute, value) in info.attributes.iter_mut().enumerate() {
            let _ = driver.func_get_attribute(value, attribute as u32, raw);
        }
        let params =
            params_of(|index, offset, size| driver.func_get_param_info(raw, index, offset, size));
        info.params = params.len() as u32;
        info.flags = if prints { FUNCTION_PRINTS } else { 0 };
        let param_bytes = params
            .iter()
            .map(|param| param.offset + param.size)
            .max()
            .unwrap_or(0);
        let mut payload = info.as_bytes().to_vec();
        payload.extend_from_slice(params.as_bytes());
        let function = Function {
            raw,
            param_bytes,
            image: body.parent,
            device,
            prints,
        };
        self.functions
            .insert(body.function, function)
            .map_err(|(status, _)| status)?;
        Ok(payload)
    }

    /// A library's kernel, wherever it will run: whether it is there, and its parameters.
    fn describe_kernel(&self, shared: &Shared, library: u64, name: &[u8]) -> Reply {
        let driver = &shared.driver;
        let kernel = self.kernel(shared, library, name)?;
        let params = params_of(|index, offset, size| {
            driver.kernel_get_param_info(kernel, index, offset, size)
        });
        let info = FunctionInfo {
            attributes: [i32::MIN; 16],
            params: params.len() as u32,
            flags: if self.libraries.get(library)?.prints {
                FUNCTION_PRINTS
            } else {
                0
            },
        };
        let mut payload = info.as_bytes().to_vec();
        payload.extend_from_slice(params.as_bytes());
        Ok(payload)
    }

    fn kernel(&self, shared: &Shared, library: u64, name: &[u8]) -> Result<CUkernel, CUresult> {
        let Raw::Library(library) = self.libraries.get(library)?.raw else {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        };
        shared.use_any_device();
        let mut kernel = CUkernel::NULL;
        shared
            .driver
            .library_get_kernel(&mut kernel, library, name.as_ptr().cast())?;
        Ok(kernel)
    }

    /// `cuKernelGetAttribute`, `cuKernelSetAttribute`.
    pub fn kernel_attribute(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: KernelAttribute = self.body(message)?;
        let name = self.name::<KernelAttribute>(message)?;
        let device = shared.device(body.device)?;
        let kernel = self.kernel(shared, body.library, &name)?;
        // Only a preference: a device that nobody has attached to has no context.
        let _ = device.make_current(&shared.driver);
        let device = device.raw;
        let image = &shared.driver.image;
        let mut value = body.value;
        if body.set == 0 {
            image.kernel_get_attribute(&mut value, body.attribute, kernel, device)?;
        } else {
            image.kernel_set_attribute(body.attribute, value, kernel, device)?;
        }
        Ok(super::value(value as i64 as u64))
    }

    /// The driver's function behind a handle, its context made current.
    pub fn function_ready(&self, shared: &Shared, handle: u64) -> Result<CUfunction, CUresult> {
        let function = self.function(handle)?;
        shared.devices[function.device].make_current(&shared.driver)?;
        Ok(function.raw)
    }

    /// What the session's kernels printed.
    pub fn printed(&mut self, shared: &Shared) -> Reply {
        let (text, left) = self.take_printed(shared, ANSWER_LEN - size_of::<Value>())?;
        let mut payload = super::value(left as u64);
        payload.extend_from_slice(&text);
        Ok(payload)
    }

    /// `cuFuncGetAttribute`.
    pub fn get_function_attribute(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: FunctionAttribute = self.body(message)?;
        let function = self.function_ready(shared, body.function)?;
        let mut value = 0;
        shared
            .driver
            .func_get_attribute(&mut value, body.attribute, function)?;
        Ok(super::value(value as i64 as u64))
    }

    /// `cuFuncSetAttribute`.
    pub fn set_function_attribute(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: FunctionAttribute = self.body(message)?;
        let function = self.function_ready(shared, body.function)?;
        shared
            .driver
            .func_set_attribute(function, body.attribute, body.value)?;
        Ok(Vec::new())
    }
}
