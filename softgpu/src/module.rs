//! Modules, libraries, and the kernels in them.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use mpsshim_proto::cuda::*;
use parking_lot::Mutex;

use crate::api::{In, Out, R, Text, api, log, put_text};
use crate::context::{Context, live};
use crate::device::{SHARED_DEFAULT, SHARED_OPTIN};
use crate::driver::{driver, new_handle, start};
use crate::image::{self, Refused};
use crate::memory;
use crate::ptx::code::{Function, Program};
use crate::ptx::parse;

/// A program in one context, with variables of its own.
pub struct Module {
    pub handle: u64,
    /// The id of its context.
    pub context: u64,
    pub program: Arc<Program>,
    /// Where its data lies; 0 if it has none.
    pub data: u64,
    kernels: Mutex<HashMap<usize, u64>>,
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.data != 0 {
            memory::free_module(self.data);
        }
    }
}

/// A program that becomes a module in each context that uses it.
pub struct Library {
    pub handle: u64,
    /// Never the id of a context: libraries outlive them.
    pub context: u64,
    program: Arc<Program>,
    instances: Mutex<HashMap<u64, Arc<Module>>>,
    kernels: Mutex<HashMap<usize, u64>>,
}

enum Owner {
    Module(Arc<Module>),
    Library(Arc<Library>),
}

/// What a `CUfunction` or a `CUkernel` stands for.
pub struct Kernel {
    /// The id of its context; 0 for a library's.
    pub context: u64,
    owner: Owner,
    pub index: usize,
    name: CString,
    dynamic_shared: AtomicU32,
    carveout: AtomicU32,
}

impl Kernel {
    pub fn program(&self) -> &Arc<Program> {
        match &self.owner {
            Owner::Module(module) => &module.program,
            Owner::Library(library) => &library.program,
        }
    }
    pub fn function(&self) -> &Function {
        &self.program().functions[self.index]
    }
    /// The module that it runs in when launched in `context`.
    pub fn module(&self, context: &Arc<Context>) -> R<Arc<Module>> {
        match &self.owner {
            Owner::Module(module) if module.context == context.id => Ok(module.clone()),
            Owner::Module(_) => Err(CUDA_ERROR_INVALID_HANDLE),
            Owner::Library(library) => library.instance(context),
        }
    }
    /// Dynamic shared memory that a launch may ask for, bytes.
    pub fn max_dynamic_shared(&self) -> u32 {
        self.dynamic_shared.load(Ordering::Relaxed)
    }
    fn attribute(&self, which: CUfunction_attribute) -> R<i32> {
        let f = self.function();
        Ok(match which {
            CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK => f.max_threads as i32,
            CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES => f.shared_bytes as i32,
            CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES => f.frame_bytes as i32,
            CU_FUNC_ATTRIBUTE_NUM_REGS => f.registers.clamp(16, 64) as i32,
            CU_FUNC_ATTRIBUTE_PTX_VERSION => self.program().target as i32,
            CU_FUNC_ATTRIBUTE_BINARY_VERSION => 90,
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES => self.max_dynamic_shared() as i32,
            CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT => {
                self.carveout.load(Ordering::Relaxed) as i32
            }
            n if n < CU_FUNC_ATTRIBUTE_MAX => 0,
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        })
    }
    fn set_attribute(&self, which: CUfunction_attribute, value: i32) -> R<()> {
        match which {
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES => {
                let room = SHARED_OPTIN.saturating_sub(self.function().shared_bytes);
                let value = u32::try_from(value)
                    .ok()
                    .filter(|&v| v <= room)
                    .ok_or(CUDA_ERROR_INVALID_VALUE)?;
                self.dynamic_shared.store(value, Ordering::Relaxed);
            }
            CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT if (-1..=100).contains(&value) => {
                self.carveout.store(value as u32, Ordering::Relaxed);
            }
            CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            | CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE => {}
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        }
        Ok(())
    }
    fn param(&self, n: usize, offset: Out<usize>, size: Out<usize>) -> R<()> {
        let param = self
            .function()
            .params
            .get(n)
            .ok_or(CUDA_ERROR_INVALID_VALUE)?;
        offset.set(param.offset as usize)?;
        size.put(param.bytes as usize);
        Ok(())
    }
}

impl Module {
    fn new(program: Arc<Program>, context: &Arc<Context>) -> R<Arc<Module>> {
        let data = if program.data.is_empty() {
            0
        } else {
            let at = memory::allocate(
                context.id,
                context.device,
                program.data.len() as u64,
                memory::Kind::Module,
            )?;
            let mut content = program.data.clone();
            for &(place, add) in &program.relocations {
                let place = place as usize;
                content[place..place + 8].copy_from_slice(&at.wrapping_add(add).to_le_bytes());
            }
            // SAFETY: `allocate` gave at least that many bytes, which nobody else knows of yet.
            unsafe { std::ptr::copy_nonoverlapping(content.as_ptr(), at as *mut u8, content.len()) }
            at
        };
        let module = Module {
            handle: new_handle(),
            context: context.id,
            program,
            data,
            kernels: Mutex::default(),
        };
        Ok(Arc::new(module))
    }

    fn global(&self, name: &str, address: Out<u64>, bytes: Out<usize>) -> R<()> {
        let global = self.program.globals.get(name).ok_or(CUDA_ERROR_NOT_FOUND)?;
        address.put(self.data + global.offset);
        bytes.put(global.bytes as usize);
        Ok(())
    }
}

impl Library {
    fn instance(&self, context: &Arc<Context>) -> R<Arc<Module>> {
        let mut instances = self.instances.lock();
        if let Some(module) = instances.get(&context.id) {
            return Ok(module.clone());
        }
        let module = Module::new(self.program.clone(), context)?;
        start().modules.insert(module.handle, module.clone());
        instances.insert(context.id, module.clone());
        Ok(module)
    }
}

/// The handle of a kernel, the same one each time.
fn kernel_handle(owner: Owner, index: usize) -> R<u64> {
    let (kernels, program, context) = match &owner {
        Owner::Module(m) => (&m.kernels, m.program.clone(), m.context),
        Owner::Library(l) => (&l.kernels, l.program.clone(), 0),
    };
    let mut kernels = kernels.lock();
    if let Some(&handle) = kernels.get(&index) {
        return Ok(handle);
    }
    let handle = new_handle();
    kernels.insert(index, handle);
    drop(kernels);
    let f = &program.functions[index];
    let dynamic = SHARED_DEFAULT.saturating_sub(f.shared_bytes);
    let name = CString::new(f.name.as_str()).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
    let (dynamic_shared, carveout) = (AtomicU32::new(dynamic), AtomicU32::new(u32::MAX));
    start().kernels.insert(
        handle,
        Arc::new(Kernel {
            context,
            owner,
            index,
            name,
            dynamic_shared,
            carveout,
        }),
    );
    Ok(handle)
}

pub fn kernel(handle: u64) -> R<Arc<Kernel>> {
    driver()?.kernels.get(handle)
}

/// The caller's JIT options; only the logs matter here.
#[derive(Clone, Copy)]
struct Options {
    count: u32,
    keys: In<u32>,
    values: Out<u64>,
}

impl Options {
    fn find(&self, key: u32) -> Option<usize> {
        (0..self.count.min(64) as usize).find(|&n| self.keys.get(n) == Ok(key))
    }
    /// Puts `text` into the log with this buffer and size option, and its length where the size stood.
    fn write(&self, buffer: u32, size: u32, text: &str) {
        let value = |n: usize| self.values.at(n).get().ok();
        if let (Some(at), Some(n)) = (self.find(buffer).and_then(value), self.find(size))
            && let Some(room) = value(n)
        {
            let room = room as u32 as usize;
            if at != 0 && put_text(Out::to(at), room, text).is_ok() {
                self.values
                    .at(n)
                    .put(text.len().min(room.saturating_sub(1)) as u64 + 1);
            }
        }
    }
}

const NO_OPTIONS: Options = Options {
    count: 0,
    keys: In(std::ptr::null()),
    values: Out::NOWHERE,
};

fn load(text: Result<String, Refused>, options: Options) -> R<Arc<Program>> {
    let refused = |status: CUresult, reason: &str| {
        log(|| format!("module refused: {reason}"));
        options.write(5, 6, reason);
        status
    };
    let text = text.map_err(|Refused(status, reason)| refused(status, &reason))?;
    match parse(&text) {
        Ok(program) => {
            options.write(3, 4, "");
            Ok(Arc::new(program))
        }
        Err(error) => {
            let is_ptx = text.contains(".version");
            let status = if is_ptx {
                CUDA_ERROR_INVALID_PTX
            } else {
                CUDA_ERROR_INVALID_IMAGE
            };
            Err(refused(status, &format!("softgpu: {error}")))
        }
    }
}

fn read_file(path: Text) -> R<Result<String, Refused>> {
    Ok(image::ptx_in(
        std::fs::read(path.get()?).map_err(|_| CUDA_ERROR_FILE_NOT_FOUND)?,
    ))
}

fn load_module(
    out: Out<CUmodule>,
    text: impl FnOnce() -> R<Result<String, Refused>>,
    options: Options,
) -> R<()> {
    let context = live()?;
    if out.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let module = Module::new(load(text()?, options)?, &context)?;
    out.set(CUmodule(module.handle))?;
    start().modules.insert(module.handle, module);
    Ok(())
}

fn load_library(out: Out<CUlibrary>, text: Result<String, Refused>, options: Options) -> R<()> {
    if out.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let program = load(text, options)?;
    let handle = new_handle();
    let library = Library {
        handle,
        context: 0,
        program,
        instances: Mutex::default(),
        kernels: Mutex::default(),
    };
    start().libraries.insert(handle, Arc::new(library));
    out.set(CUlibrary(handle))
}

fn module(handle: CUmodule) -> R<Arc<Module>> {
    live()?;
    driver()?.modules.get(handle.0)
}

fn library(handle: CUlibrary) -> R<Arc<Library>> {
    driver()?.libraries.get(handle.0)
}

/// Gives the address of a kernel's name, which lives as long as the kernel.
fn put_name(out: Out<u64>, kernel: &Kernel) -> R<()> {
    out.set(kernel.name.as_ptr() as u64)
}

/// Hands out the handles of the first `room` kernels.
fn enumerate(out: Out<u64>, room: u32, program: &Program, owner: impl Fn() -> Owner) -> R<()> {
    for (n, index) in program.kernels().take(room as usize).enumerate() {
        out.at(n).set(kernel_handle(owner(), index)?)?;
    }
    Ok(())
}

fn find_kernel(program: &Program, name: Text) -> R<usize> {
    program.kernel(&name.get()?).ok_or(CUDA_ERROR_NOT_FOUND)
}

api! { TABLE;
    fn cuModuleLoad(out: Out<CUmodule>, path: Text) { load_module(out, || read_file(path), NO_OPTIONS) }
    fn cuModuleLoadData(out: Out<CUmodule>, image: u64) { load_module(out, || Ok(image::ptx_at(image)), NO_OPTIONS) }
    fn cuModuleLoadDataEx(out: Out<CUmodule>, image: u64, count: u32, keys: In<u32>, values: Out<u64>) {
        load_module(out, || Ok(image::ptx_at(image)), Options { count, keys, values })
    }
    fn cuModuleLoadFatBinary(out: Out<CUmodule>, image: u64) { load_module(out, || Ok(image::ptx_at(image)), NO_OPTIONS) }
    fn cuModuleUnload(handle: CUmodule) {
        let context = live()?;
        let module = driver()?.modules.get(handle.0)?;
        if driver()?.libraries.all().iter().any(|l| l.instances.lock().values().any(|m| m.handle == handle.0)) {
            return Err(CUDA_ERROR_NOT_PERMITTED);
        }
        context.wait_idle();
        let _ = driver()?.modules.remove(handle.0);
        driver()?.kernels.retain(|k| !matches!(&k.owner, Owner::Module(m) if m.handle == module.handle));
        Ok(())
    }
    fn cuModuleGetFunction(out: Out<CUfunction>, handle: CUmodule, name: Text) {
        let module = module(handle)?;
        let index = find_kernel(&module.program, name)?;
        out.set(CUfunction(kernel_handle(Owner::Module(module), index)?))
    }
    fn cuModuleGetFunctionCount(out: Out<u32>, handle: CUmodule) { out.set(module(handle)?.program.kernels().count() as u32) }
    fn cuModuleEnumerateFunctions(out: Out<u64>, room: u32, handle: CUmodule) {
        let module = module(handle)?;
        enumerate(out, room, &module.program, || Owner::Module(module.clone()))
    }
    fn cuModuleGetGlobal_v2(address: Out<u64>, bytes: Out<usize>, handle: CUmodule, name: Text) {
        module(handle)?.global(&name.get()?, address, bytes)
    }
    fn cuModuleGetLoadingMode(mode: Out<u32>) { mode.set(1) }

    fn cuLibraryLoadData(out: Out<CUlibrary>, image: u64, keys: In<u32>, values: Out<u64>, count: u32,
                         _library_keys: u64, _library_values: u64, _library_count: u32) {
        driver()?;
        load_library(out, image::ptx_at(image), Options { count, keys, values })
    }
    fn cuLibraryLoadFromFile(out: Out<CUlibrary>, path: Text, keys: In<u32>, values: Out<u64>, count: u32,
                             _library_keys: u64, _library_values: u64, _library_count: u32) {
        driver()?;
        load_library(out, read_file(path)?, Options { count, keys, values })
    }
    fn cuLibraryUnload(handle: CUlibrary) {
        let library = driver()?.libraries.remove(handle.0)?;
        driver()?.contexts.all().iter().for_each(|c| c.wait_idle());
        let instances = std::mem::take(&mut *library.instances.lock());
        for module in instances.values() {
            let _ = driver()?.modules.remove(module.handle);
        }
        driver()?.kernels.retain(|k| match &k.owner {
            Owner::Library(l) => l.handle != library.handle,
            Owner::Module(m) => !instances.values().any(|i| i.handle == m.handle),
        });
        Ok(())
    }
    fn cuLibraryGetKernel(out: Out<CUkernel>, handle: CUlibrary, name: Text) {
        let library = library(handle)?;
        let index = find_kernel(&library.program, name)?;
        out.set(CUkernel(kernel_handle(Owner::Library(library), index)?))
    }
    fn cuLibraryGetKernelCount(out: Out<u32>, handle: CUlibrary) { out.set(library(handle)?.program.kernels().count() as u32) }
    fn cuLibraryEnumerateKernels(out: Out<u64>, room: u32, handle: CUlibrary) {
        let library = library(handle)?;
        enumerate(out, room, &library.program, || Owner::Library(library.clone()))
    }
    fn cuLibraryGetModule(out: Out<CUmodule>, handle: CUlibrary) {
        out.set(CUmodule(library(handle)?.instance(&live()?)?.handle))
    }
    fn cuLibraryGetGlobal(address: Out<u64>, bytes: Out<usize>, handle: CUlibrary, name: Text) {
        library(handle)?.instance(&live()?)?.global(&name.get()?, address, bytes)
    }

    fn cuKernelGetFunction(out: Out<CUfunction>, handle: CUkernel) {
        let kernel = kernel(handle.0)?;
        let module = kernel.module(&live()?)?;
        out.set(CUfunction(kernel_handle(Owner::Module(module), kernel.index)?))
    }
    fn cuKernelGetAttribute(out: Out<i32>, which: CUfunction_attribute, handle: CUkernel, _device: CUdevice) {
        out.set(kernel(handle.0)?.attribute(which)?)
    }
    fn cuKernelSetAttribute(which: CUfunction_attribute, value: i32, handle: CUkernel, _device: CUdevice) {
        kernel(handle.0)?.set_attribute(which, value)
    }
    fn cuKernelSetCacheConfig(handle: CUkernel, _config: u32, _device: CUdevice) { kernel(handle.0).map(drop) }
    fn cuKernelGetParamInfo(handle: CUkernel, n: usize, offset: Out<usize>, size: Out<usize>) { kernel(handle.0)?.param(n, offset, size) }
    fn cuKernelGetName(out: Out<u64>, handle: CUkernel) { put_name(out, &*kernel(handle.0)?) }
    fn cuKernelGetLibrary(out: Out<CUlibrary>, handle: CUkernel) {
        match &kernel(handle.0)?.owner {
            Owner::Library(library) => out.set(CUlibrary(library.handle)),
            Owner::Module(_) => Err(CUDA_ERROR_INVALID_HANDLE),
        }
    }

    fn cuFuncGetAttribute(out: Out<i32>, which: CUfunction_attribute, handle: CUfunction) {
        live()?;
        out.set(kernel(handle.0)?.attribute(which)?)
    }
    fn cuFuncSetAttribute(handle: CUfunction, which: CUfunction_attribute, value: i32) {
        live()?;
        kernel(handle.0)?.set_attribute(which, value)
    }
    fn cuFuncGetParamInfo(handle: CUfunction, n: usize, offset: Out<usize>, size: Out<usize>) { kernel(handle.0)?.param(n, offset, size) }
    fn cuFuncGetModule(out: Out<CUmodule>, handle: CUfunction) { out.set(CUmodule(kernel(handle.0)?.module(&live()?)?.handle)) }
    fn cuFuncGetName(out: Out<u64>, handle: CUfunction) { put_name(out, &*kernel(handle.0)?) }
    fn cuFuncIsLoaded(out: Out<u32>, handle: CUfunction) {
        kernel(handle.0)?;
        out.set(1)
    }
    fn cuFuncLoad(handle: CUfunction) { kernel(handle.0).map(drop) }
    fn cuFuncSetCacheConfig(handle: CUfunction, _config: u32) { kernel(handle.0).map(drop) }
    fn cuFuncSetSharedMemConfig(handle: CUfunction, _config: u32) { kernel(handle.0).map(drop) }
}
