//! Functions and kernels: lookup, parameters, attributes.

use super::super::Shared;
use super::super::images::Raw;
use super::super::session::{Function, Session};
use super::Reply;
use mpsshim_proto::cuda::*;
use mpsshim_proto::message::{
    FUNCTION_PRINTS, FunctionAttribute, FunctionInfo, GetFunction, Param, Value,
};
use mpsshim_proto::ring::Message;
use mpsshim_proto::segment::ANSWER_LEN;
use zerocopy::IntoBytes;

/// Parameters a kernel can have at most: one per byte of its parameter space would be 32,764.
const MAX_PARAMS: usize = 4096;

impl Session {
    /// `cuModuleGetFunction`, `cuLibraryGetKernel`. A kernel's function is loaded here and now, on the slow lane,
    /// so that no launch has to.
    pub fn get_function(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: GetFunction = self.body(message)?;
        let name = self.name::<GetFunction>(message)?;
        let driver = &shared.driver;
        let (image, device, prints) = self.image_ready(shared, body.parent)?;
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
            attributes: [-1; 16],
            ..FunctionInfo::default()
        };
        for (attribute, value) in info.attributes.iter_mut().enumerate() {
            let _ = driver.func_get_attribute(value, attribute as u32, raw);
        }
        let mut params = Vec::new();
        for index in 0..MAX_PARAMS {
            let (mut offset, mut size) = (0, 0);
            if driver
                .func_get_param_info(raw, index, &mut offset, &mut size)
                .is_err()
            {
                break;
            }
            params.push(Param {
                offset: offset as u32,
                size: size as u32,
            });
        }
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
        let table = match image {
            Raw::Module(_) => &mut self.functions,
            Raw::Library(_) => &mut self.kernels,
        };
        table
            .insert(body.function, function)
            .map_err(|(status, _)| status)?;
        Ok(payload)
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

    /// `cuFuncGetAttribute`, `cuKernelGetAttribute`.
    pub fn get_function_attribute(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: FunctionAttribute = self.body(message)?;
        let function = self.function_ready(shared, body.function)?;
        let mut value = 0;
        shared
            .driver
            .func_get_attribute(&mut value, body.attribute, function)?;
        Ok(super::value(value as i64 as u64))
    }

    /// `cuFuncSetAttribute`, `cuKernelSetAttribute`.
    pub fn set_function_attribute(&mut self, shared: &Shared, message: &Message) -> Reply {
        let body: FunctionAttribute = self.body(message)?;
        let function = self.function_ready(shared, body.function)?;
        shared
            .driver
            .func_set_attribute(function, body.attribute, body.value)?;
        Ok(Vec::new())
    }
}
