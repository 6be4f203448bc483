//! Modules and the kernels in them.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

use mpsshim_api::cuda::*;
use parking_lot::Mutex;

use crate::api::{In, Out, R, Text, api, log, put_text};
use crate::context::{self, Context, live};
use crate::device::{SHARED_DEFAULT, SHARED_OPTIN};
use crate::driver::{driver, new_handle};
use crate::driver_locks::Wait;
use crate::image::{self, Refused};
use crate::library;
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

/// What a `CUfunction` stands for.
pub struct Kernel {
    pub module: Arc<Module>,
    pub index: usize,
    name: CString,
    dynamic_shared: AtomicU32,
    /// Only reported by queries; memory is not divided here.
    carveout: AtomicI32,
}

impl Kernel {
    pub fn function(&self) -> &Function {
        &self.module.program.functions[self.index]
    }
    /// Dynamic shared memory that a launch may ask for, bytes.
    pub fn max_dynamic_shared(&self) -> u32 {
        self.dynamic_shared.load(Ordering::Relaxed)
    }
    pub fn attribute(&self, which: CUfunction_attribute) -> R<i32> {
        let f = self.function();
        Ok(match which {
            CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK => f.max_threads as i32,
            CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES => f.shared_bytes as i32,
            CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES => f.frame_bytes as i32,
            CU_FUNC_ATTRIBUTE_NUM_REGS => f.registers.clamp(16, 64) as i32,
            CU_FUNC_ATTRIBUTE_PTX_VERSION => self.module.program.target as i32,
            CU_FUNC_ATTRIBUTE_BINARY_VERSION => 90,
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES => self.max_dynamic_shared() as i32,
            CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT => {
                self.carveout.load(Ordering::Relaxed)
            }
            n if n < CU_FUNC_ATTRIBUTE_MAX => 0,
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        })
    }
    pub fn set_attribute(&self, which: CUfunction_attribute, value: i32) -> R<()> {
        match which {
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES => {
                let room = SHARED_OPTIN.saturating_sub(self.function().shared_bytes);
                let value = u32::try_from(value).ok().filter(|&v| v <= room);
                let value = value.ok_or(CUDA_ERROR_INVALID_VALUE)?;
                self.dynamic_shared.store(value, Ordering::Relaxed);
                Ok(())
            }
            CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT => {
                if !(-1..=100).contains(&value) {
                    return Err(CUDA_ERROR_INVALID_VALUE);
                }
                self.carveout.store(value, Ordering::Relaxed);
                Ok(())
            }
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }
}

/// Where a parameter of a function lies.
pub fn param(function: &Function, n: usize, offset: Out<usize>, size: Out<usize>) -> R<()> {
    let param = function.params.get(n).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    offset.set(param.offset as usize)?;
    size.put(param.bytes as usize);
    Ok(())
}

impl Module {
    pub fn new(program: Arc<Program>, context: &Context) -> R<Arc<Module>> {
        let mut data = 0;
        if !program.data.is_empty() {
            let bytes = program.data.len() as u64;
            data = memory::allocate(context.id, context.device, bytes, memory::Kind::Module)?;
            let mut content = program.data.clone();
            for &(place, add) in &program.relocations {
                let address = data.wrapping_add(add).to_le_bytes();
                content[place as usize..place as usize + 8].copy_from_slice(&address);
            }
            // SAFETY: `allocate` gave at least that many bytes, which nobody else knows of yet.
            unsafe {
                std::ptr::copy_nonoverlapping(content.as_ptr(), data as *mut u8, content.len());
            }
        }
        let (handle, context) = (new_handle(), context.id);
        Ok(Arc::new(Module {
            handle,
            context,
            program,
            data,
            kernels: Mutex::default(),
        }))
    }

    /// Whether a kernel was asked for before.
    pub fn has_handle_of(&self, index: usize) -> bool {
        self.kernels.lock().contains_key(&index)
    }

    /// The handle of a kernel, the same one each time.
    pub fn kernel(self: &Arc<Self>, index: usize) -> R<u64> {
        let mut kernels = self.kernels.lock();
        if let Some(&handle) = kernels.get(&index) {
            return Ok(handle);
        }
        let (handle, f) = (new_handle(), &self.program.functions[index]);
        kernels.insert(index, handle);
        let dynamic = SHARED_DEFAULT.saturating_sub(f.shared_bytes);
        let kernel = Kernel {
            module: self.clone(),
            index,
            name: CString::new(f.name.as_str()).map_err(|_| CUDA_ERROR_INVALID_VALUE)?,
            dynamic_shared: AtomicU32::new(dynamic),
            carveout: AtomicI32::new(-1),
        };
        driver()?.kernels.insert(handle, Arc::new(kernel));
        Ok(handle)
    }

    /// Address and size of a variable.
    pub fn global(&self, address: Out<u64>, bytes: Out<usize>, name: Text) -> R<()> {
        if address.is_null() && bytes.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let global = self
            .program
            .globals
            .get(&name.get()?)
            .ok_or(CUDA_ERROR_NOT_FOUND)?;
        address.put(self.data + global.offset);
        bytes.put(global.bytes as usize);
        Ok(())
    }
}

/// The kernel of a `CUfunction`, or of a `CUkernel` in the current context.
pub fn kernel(handle: u64) -> R<Arc<Kernel>> {
    match driver()?.kernels.get(handle) {
        Ok(kernel) => Ok(kernel),
        Err(_) => kernel_in(handle, &*live()?),
    }
}

/// As [`kernel`], where a `CUkernel` is meant in a given context.
pub fn kernel_in(handle: u64, context: &Context) -> R<Arc<Kernel>> {
    let found = driver()?.kernels.get(handle);
    found.or_else(|_| driver()?.kernels.get(library::function(handle, context)?))
}

fn module(handle: u64) -> R<Arc<Module>> {
    live()?;
    driver()?.modules.get(handle)
}

/// The caller's JIT options; only the log of errors matters here.
#[derive(Clone, Copy)]
pub struct Options {
    pub count: u32,
    pub keys: In<u32>,
    pub values: Out<u64>,
}

const NO_OPTIONS: Options = Options {
    count: 0,
    keys: In(std::ptr::null()),
    values: Out::NOWHERE,
};

impl Options {
    fn place(&self, key: u32) -> Option<Out<u64>> {
        let n = (0..self.count.min(64) as usize).find(|&n| self.keys.get(n) == Ok(key))?;
        Some(self.values.at(n))
    }
    /// The log of errors, empty so far; refuses what is no option, and a log without its length.
    pub fn open(&self) -> R<Log> {
        for n in 0..self.count as usize {
            if self.keys.get(n)? >= CU_JIT_NUM_OPTIONS {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
        }
        let open = |buffer, size| match (self.place(buffer), self.place(size)) {
            (None, None) => Ok(Log::default()),
            (Some(buffer), Some(size)) if buffer.get()? != 0 => {
                let (buffer, room) = (buffer.get()?, size.get()? as u32 as usize);
                if room != 0 {
                    Out::to(buffer).put(0u8);
                }
                size.put(0);
                Ok(Log {
                    buffer,
                    room,
                    size: Some(size),
                })
            }
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        };
        open(CU_JIT_INFO_LOG_BUFFER, CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES)?;
        open(CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES)
    }
}

/// The caller's log of errors.
#[derive(Default)]
pub struct Log {
    buffer: u64,
    room: usize,
    size: Option<Out<u64>>,
}

impl Log {
    /// Puts `text` into it, and its length where its size stood.
    pub fn tell(&self, text: &str) {
        if put_text(Out::to(self.buffer), self.room, text).is_ok()
            && let Some(size) = self.size
        {
            size.put(text.len().min(self.room - 1) as u64);
        }
    }
}

/// The program in an image.
pub fn parse_image(image: u64, options: Options) -> R<Arc<Program>> {
    let said = options.open()?;
    let program = image::ptx_at(image).and_then(|text| {
        image::end_at(&text);
        image::hang_at(&text);
        image::take_time(&text);
        parse(&text).map_err(|error| {
            let is_ptx = text.contains(".version");
            let status = if is_ptx {
                CUDA_ERROR_INVALID_PTX
            } else {
                CUDA_ERROR_INVALID_IMAGE
            };
            Refused(status, format!("softgpu: {error}"))
        })
    });
    let program = program.map_err(|Refused(status, reason)| {
        log(|| format!("module refused: {reason}"));
        said.tell(&reason);
        status
    })?;
    Ok(Arc::new(program))
}

/// Makes a module of an image; its handle goes out.
fn load(out: Out<u64>, image: u64, options: Options) -> R<()> {
    let context = live()?;
    if out.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let program = parse_image(image, options)?;
    let _held = context.waits_for_all(Wait::Holds);
    let module = Module::new(program, &context)?;
    driver()?.modules.insert(module.handle, module.clone());
    out.set(module.handle)
}

/// The content of a file, with a NUL behind it.
pub fn file(path: Text) -> R<Vec<u8>> {
    let mut image = std::fs::read(path.get()?).map_err(|_| CUDA_ERROR_FILE_NOT_FOUND)?;
    image.push(0);
    Ok(image)
}

fn unload(handle: u64) -> R<()> {
    let module = module(handle)?;
    if let Some(context) = context::by_id(module.context) {
        drop(context.drains(Wait::Only));
    }
    driver()?.modules.remove(handle)?;
    driver()?.kernels.retain(|k| k.module.handle != handle);
    Ok(())
}

fn find(out: Out<u64>, handle: u64, name: Text) -> R<()> {
    let (module, name) = (module(handle)?, name.get()?);
    out.set(module.kernel(module.program.kernel(&name).ok_or(CUDA_ERROR_NOT_FOUND)?)?)
}

/// Hands out the handles of the first `room` kernels.
fn enumerate(out: Out<u64>, room: u32, handle: u64) -> R<()> {
    let module = module(handle)?;
    let some = module.program.kernels().take(room as usize);
    some.enumerate()
        .try_for_each(|(n, index)| out.at(n).set(module.kernel(index)?))
}

fn count(out: Out<u32>, handle: u64) -> R<()> {
    out.set(module(handle)?.program.kernels().count() as u32)
}

api! { TABLE;
    fn cuModuleLoad(out: Out<u64>, path: Text) {
        load(out, file(path)?.as_ptr() as u64, NO_OPTIONS)
    }
    fn cuModuleLoadData(out: Out<u64>, image: u64) { load(out, image, NO_OPTIONS) }
    fn cuModuleLoadDataEx(out: Out<u64>, image: u64, count: u32, keys: In<u32>, values: Out<u64>) {
        load(out, image, Options { count, keys, values })
    }
    fn cuModuleLoadFatBinary(out: Out<u64>, image: u64) { load(out, image, NO_OPTIONS) }
    fn cuModuleUnload(handle: u64) { unload(handle) }
    fn cuModuleGetFunction(out: Out<u64>, handle: u64, name: Text) { find(out, handle, name) }
    fn cuModuleGetFunctionCount(out: Out<u32>, handle: u64) { count(out, handle) }
    fn cuModuleEnumerateFunctions(out: Out<u64>, room: u32, handle: u64) { enumerate(out, room, handle) }
    fn cuModuleGetGlobal_v2(address: Out<u64>, bytes: Out<usize>, handle: u64, name: Text) {
        module(handle)?.global(address, bytes, name)
    }
    fn cuFuncGetName(out: Out<u64>, handle: u64) { out.set(kernel(handle)?.name.as_ptr() as u64) }
    fn cuFuncGetParamInfo(handle: u64, n: usize, offset: Out<usize>, size: Out<usize>) {
        param(kernel(handle)?.function(), n, offset, size)
    }
    fn cuFuncGetModule(out: Out<u64>, handle: u64) { out.set(kernel(handle)?.module.handle) }
    fn cuFuncGetAttribute(out: Out<i32>, which: CUfunction_attribute, handle: u64) {
        live()?;
        out.set(kernel(handle)?.attribute(which)?)
    }
    fn cuFuncSetAttribute(handle: u64, which: CUfunction_attribute, value: i32) {
        live()?;
        kernel(handle)?.set_attribute(which, value)
    }
}
