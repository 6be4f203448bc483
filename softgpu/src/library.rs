//! Libraries: code that belongs to no context, and the modules that they become in the contexts that use them.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::Arc;

use mpsshim_api::cuda::*;
use parking_lot::Mutex;

use crate::api::{In, Out, R, Text, api};
use crate::context::{self, Context, live};
use crate::driver::{driver, new_handle};
use crate::driver_locks::Wait;
use crate::module::{Kernel, Module, Options, file, parse_image};
use crate::ptx::code::Program;

pub struct Library {
    /// What an image is wrong with comes out when something in it is asked for, as with lazy loading.
    program: R<Arc<Program>>,
    /// By context.
    modules: Mutex<HashMap<u64, Arc<Module>>>,
    kernels: Mutex<HashMap<usize, u64>>,
}

/// What a `CUkernel` stands for.
pub struct LibraryKernel {
    library: u64,
    index: usize,
    name: CString,
}

fn library(handle: u64) -> R<Arc<Library>> {
    driver()?.libraries.get(handle)
}

fn kernel(handle: u64) -> R<Arc<LibraryKernel>> {
    driver()?.library_kernels.get(handle)
}

impl Library {
    fn program(&self) -> R<&Arc<Program>> {
        self.program.as_ref().map_err(|status| *status)
    }
    fn loaded(&self, context: &Context) -> Option<Arc<Module>> {
        self.modules.lock().get(&context.id).cloned()
    }
    fn module(&self, context: &Context) -> R<Arc<Module>> {
        if let Some(module) = self.loaded(context) {
            return Ok(module);
        }
        let program = self.program()?.clone();
        // Before the lock of the modules, which other contexts take too.
        let _held = context.waits_for_all(Wait::Holds);
        let mut modules = self.modules.lock();
        if let Some(module) = modules.get(&context.id) {
            return Ok(module.clone());
        }
        let module = Module::new(program, context)?;
        driver()?.modules.insert(module.handle, module.clone());
        modules.insert(context.id, module.clone());
        Ok(module)
    }
    /// Handle of a function in a context.
    fn function(&self, index: usize, context: &Context) -> R<u64> {
        if let Some(module) = self.loaded(context) {
            if !module.has_handle_of(index) {
                context.has_new_function();
            }
            return module.kernel(index);
        }
        self.module(context)?.kernel(index)
    }
    /// A context is over.
    pub fn leave(&self, context: u64) {
        self.modules.lock().remove(&context);
    }
    fn kernel(&self, library: u64, index: usize) -> R<u64> {
        let mut kernels = self.kernels.lock();
        if let Some(&handle) = kernels.get(&index) {
            return Ok(handle);
        }
        let handle = new_handle();
        let name = self.program()?.functions[index].name.as_str();
        let kernel = LibraryKernel {
            library,
            index,
            name: CString::new(name).map_err(|_| CUDA_ERROR_INVALID_VALUE)?,
        };
        driver()?.library_kernels.insert(handle, Arc::new(kernel));
        kernels.insert(index, handle);
        Ok(handle)
    }
}

/// Handle of the function that a kernel is in a context.
pub fn function(handle: u64, context: &Context) -> R<u64> {
    let kernel = kernel(handle)?;
    library(kernel.library)?.function(kernel.index, context)
}

/// The same on a device: of the current context, or of the primary one.
fn function_on(handle: u64, device: CUdevice) -> R<Arc<Kernel>> {
    let context = live()?;
    crate::driver::device(device)?;
    if context.device != device {
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    }
    driver()?.kernels.get(function(handle, &context)?)
}

fn load(out: Out<u64>, image: u64, options: Options) -> R<()> {
    if out.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if image == 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let library = Library {
        program: parse_image(image, options),
        modules: Mutex::default(),
        kernels: Mutex::default(),
    };
    let handle = new_handle();
    driver()?.libraries.insert(handle, Arc::new(library));
    out.set(handle)
}

api! { TABLE;
    fn cuLibraryLoadData(out: Out<u64>, image: u64, keys: In<u32>, values: Out<u64>, count: u32,
                         _library_keys: u64, _library_values: u64, _library_count: u32) {
        load(out, image, Options { count, keys, values })
    }
    fn cuLibraryLoadFromFile(out: Out<u64>, path: Text, keys: In<u32>, values: Out<u64>, count: u32,
                             _library_keys: u64, _library_values: u64, _library_count: u32) {
        load(out, file(path)?.as_ptr() as u64, Options { count, keys, values })
    }
    fn cuLibraryUnload(handle: u64) {
        let library = driver()?.libraries.remove(handle)?;
        driver()?.library_kernels.retain(|k| k.library != handle);
        let modules = std::mem::take(&mut *library.modules.lock());
        for module in modules.into_values() {
            if let Some(context) = context::by_id(module.context) {
                drop(context.drains(Wait::Only));
            }
            driver()?.modules.retain(|m| m.handle != module.handle);
            driver()?.kernels.retain(|k| k.module.handle != module.handle);
        }
        Ok(())
    }
    fn cuLibraryGetKernel(out: Out<u64>, handle: u64, name: Text) {
        let library = library(handle)?;
        let index = library.program()?.kernel(&name.get()?).ok_or(CUDA_ERROR_NOT_FOUND)?;
        out.set(library.kernel(handle, index)?)
    }
    fn cuLibraryGetKernelCount(out: Out<u32>, handle: u64) {
        out.set(library(handle)?.program()?.kernels().count() as u32)
    }
    fn cuLibraryEnumerateKernels(out: Out<u64>, room: u32, handle: u64) {
        let library = library(handle)?;
        let some = library.program()?.kernels().take(room as usize);
        some.enumerate().try_for_each(|(n, index)| out.at(n).set(library.kernel(handle, index)?))
    }
    fn cuLibraryGetModule(out: Out<u64>, handle: u64) { out.set(library(handle)?.module(&*live()?)?.handle) }
    fn cuLibraryGetGlobal(address: Out<u64>, bytes: Out<usize>, handle: u64, name: Text) {
        let module = library(handle)?.module(&*live()?)?;
        module.global(address, bytes, name)
    }
    fn cuLibraryGetManaged(_address: Out<u64>, _bytes: Out<usize>, handle: u64, name: Text) {
        let library = library(handle)?;
        name.get()?;
        library.module(&*live()?)?;
        Err(CUDA_ERROR_NOT_FOUND)
    }
    fn cuLibraryGetUnifiedFunction(_out: Out<u64>, handle: u64, name: Text) {
        library(handle)?;
        name.get()?;
        Err(CUDA_ERROR_INVALID_VALUE)
    }
    fn cuKernelGetFunction(out: Out<u64>, handle: u64) { out.set(function(handle, &*live()?)?) }
    fn cuKernelGetLibrary(out: Out<u64>, handle: u64) { out.set(kernel(handle)?.library) }
    fn cuKernelGetParamInfo(handle: u64, n: usize, offset: Out<usize>, size: Out<usize>) {
        let (context, kernel) = (live()?, kernel(handle)?);
        let module = library(kernel.library)?.module(&context)?;
        crate::module::param(&module.program.functions[kernel.index], n, offset, size)
    }
    // The name lives as long as the kernel.
    fn cuKernelGetName(out: Out<u64>, handle: u64) { out.set(kernel(handle)?.name.as_ptr() as u64) }
    fn cuKernelGetAttribute(out: Out<i32>, which: CUfunction_attribute, handle: u64, device: CUdevice) {
        kernel(handle)?;
        out.set(function_on(handle, device)?.attribute(which)?)
    }
    fn cuKernelSetAttribute(which: CUfunction_attribute, value: i32, handle: u64, device: CUdevice) {
        kernel(handle)?;
        function_on(handle, device)?.set_attribute(which, value)
    }
}
