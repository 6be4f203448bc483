//! Modules and libraries, and the functions and kernels in them.
//!
//! A module belongs to a context, a library to none; here a library is loaded on the device that is current when
//! it is loaded. A function's parameter layout comes with the function, once, so that a launch packs its
//! parameters without asking.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::io::Write;
use std::os::fd::AsFd;
use std::ptr;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, Ordering};

use mpsshim_proto::cuda::{
    CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_MPS_RPC_FAILURE, CUDA_ERROR_NOT_FOUND,
    CUDA_ERROR_OPERATING_SYSTEM, CUDA_ERROR_OUT_OF_MEMORY,
};
use mpsshim_proto::handle::{Handle, Kind};
use mpsshim_proto::message::{
    FUNCTION_PRINTS, FunctionAttribute, FunctionInfo, GetFunction, ImageLoad, ImageLoaded,
    JitOption, Named, Object, Op, PARAMS_MAX, Param, Range, Value,
};
use mpsshim_proto::shm;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::context::Context;
use crate::ffi::Status;
use crate::memory::{self, Global};
use crate::objects::{Entry, Table};
use crate::submit::Session;

/// Images up to this many bytes are sent without asking first whether the server has them.
const SEND_UNASKED: usize = 64 << 10;

/// Every module, library, function and kernel of the process.
static MODULES: Table<Image> = Table::new(Kind::Module);
static LIBRARIES: Table<Image> = Table::new(Kind::Library);
static FUNCTIONS: Table<Function> = Table::new(Kind::Function);
static KERNELS: Table<Function> = Table::new(Kind::Kernel);

/// A function or kernel and its handle.
pub type FunctionRef = &'static Entry<Function>;

/// A loaded module or library.
#[derive(Debug, Default)]
pub struct Image {
    context: AtomicPtr<Context>,
    parts: Mutex<Parts>,
}

#[derive(Debug, Default)]
struct Parts {
    hash: [u8; 32],
    functions: HashMap<CString, u64>,
    globals: HashMap<CString, (u64, u64)>,
}

/// A function of a module or a kernel of a library.
#[derive(Debug, Default)]
pub struct Function {
    layout: AtomicPtr<Layout>,
    context: AtomicPtr<Context>,
    parent: AtomicU64,
    /// `CU_FUNC_ATTRIBUTE_*` 0 to 15; -1 where it has to be asked for.
    attributes: [AtomicI32; 16],
}

/// What never changes about a function. One for each content and name, kept for the life of the process.
#[derive(Debug)]
pub struct Layout {
    pub name: CString,
    pub params: Vec<Param>,
    /// Bytes of all parameters.
    pub len: usize,
    /// Launching it may print.
    pub prints: bool,
}

impl Function {
    /// Its name and parameters.
    #[inline]
    pub fn layout(&self) -> &'static Layout {
        // SAFETY: set before the function is published, to a layout, none of which is ever freed.
        unsafe { &*self.layout.load(Ordering::Acquire) }
    }
    /// The context it was loaded in.
    #[inline]
    pub fn context(&self) -> &'static Context {
        // SAFETY: set before the function is published, to a context, none of which is ever freed.
        unsafe { &*self.context.load(Ordering::Acquire) }
    }
    /// Handle of its module or library.
    pub fn parent(&self) -> u64 {
        self.parent.load(Ordering::Relaxed)
    }
    /// An attribute that is known here.
    #[inline]
    pub fn known(&self, attribute: u32) -> Option<i32> {
        let value = self.attributes.get(attribute as usize)?;
        Some(value.load(Ordering::Relaxed)).filter(|value| *value >= 0)
    }
}

/// The function of a `CUfunction` or `CUkernel`.
#[inline]
pub fn function(handle: u64) -> Status<FunctionRef> {
    FUNCTIONS
        .get(handle)
        .or_else(|| KERNELS.get(handle))
        .ok_or(CUDA_ERROR_INVALID_HANDLE)
}

fn table_of(handle: u64) -> Status<&'static Table<Image>> {
    match Handle(handle).kind() {
        Some(Kind::Module) => Ok(&MODULES),
        Some(Kind::Library) => Ok(&LIBRARIES),
        _ => Err(CUDA_ERROR_INVALID_HANDLE),
    }
}

/// The module or library of a handle.
fn image(handle: u64) -> Status<&'static Entry<Image>> {
    table_of(handle)?
        .get(handle)
        .ok_or(CUDA_ERROR_INVALID_HANDLE)
}

/// Whether a handle is a library's (else a module's).
pub fn is_library(handle: u64) -> bool {
    LIBRARIES.get(handle).is_some()
}

/// What a load gave besides the handle.
#[derive(Debug, Default)]
pub struct Loaded {
    pub info_log: Vec<u8>,
    pub error_log: Vec<u8>,
    pub wall_time_ms: f32,
}

/// Loads an image: the handle's status, and the logs in either case.
pub fn load(
    session: &Session,
    context: &'static Context,
    kind: Kind,
    content: &[u8],
    options: &[JitOption],
    (info_log, error_log): (u32, u32),
) -> (Status<u64>, Loaded) {
    let mut loaded = Loaded::default();
    let status = load_inner(
        session,
        context,
        kind,
        content,
        options,
        (info_log, error_log),
        &mut loaded,
    );
    (status, loaded)
}

fn load_inner(
    session: &Session,
    context: &'static Context,
    kind: Kind,
    content: &[u8],
    options: &[JitOption],
    (info_log, error_log): (u32, u32),
    loaded: &mut Loaded,
) -> Status<u64> {
    let table = if kind == Kind::Library {
        &LIBRARIES
    } else {
        &MODULES
    };
    let hash: [u8; 32] = Sha256::digest(content).into();
    let entry = table.claim().ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    let body = ImageLoad {
        image: table.handle_of(entry),
        hash,
        len: content.len() as u64,
        options: options.len() as u32,
        device: context.server_device,
        info_log: info_log.min(16 << 10),
        error_log: error_log.min(16 << 10),
    };
    let asked = if content.len() > SEND_UNASKED {
        let answer = session.ask(Op::ImageLoad, &body, options.as_bytes());
        match answer {
            Ok(answer) if answer.status == CUDA_ERROR_NOT_FOUND => None,
            other => Some(other),
        }
    } else {
        None
    };
    let answer = asked.unwrap_or_else(|| {
        let file = shm::sealed_memfd(c"image", content.len() as u64).map_err(|error| {
            tracing::error!(%error, "no memory file for an image");
            CUDA_ERROR_OPERATING_SYSTEM
        })?;
        let mut file = std::fs::File::from(file);
        file.write_all(content)
            .map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
        let len = content.len() as u64;
        session.ask_sending(Op::ImageLoad, &body, options.as_bytes(), file.as_fd(), len)
    });
    let status = answer.and_then(|answer| {
        if let Ok((head, logs)) = ImageLoaded::read_from_prefix(&answer.payload) {
            let info = (head.info_log as usize).min(logs.len());
            let error = (head.error_log as usize).min(logs.len() - info);
            loaded.info_log = logs[..info].to_vec();
            loaded.error_log = logs[info..info + error].to_vec();
            loaded.wall_time_ms = head.wall_time_ms;
        }
        answer.status.ok()
    });
    if let Err(status) = status {
        table.recycle(entry);
        return Err(status);
    }
    entry
        .context
        .store(ptr::from_ref(context).cast_mut(), Ordering::Release);
    *entry.parts.lock() = Parts {
        hash,
        ..Parts::default()
    };
    let handle = table.publish(entry);
    context.own_image(handle);
    Ok(handle)
}

/// Unloads a module or library with its functions.
pub fn unload(session: &Session, handle: u64) -> Status {
    let table = table_of(handle)?;
    let entry = table.retire(handle).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
    // SAFETY: set before the image was published, to a context, none of which is ever freed.
    let context = unsafe { &*entry.context.load(Ordering::Acquire) };
    context.forget_image(handle);
    let parts = std::mem::take(&mut *entry.parts.lock());
    for function in parts.functions.into_values() {
        for table in [&FUNCTIONS, &KERNELS] {
            if let Some(function) = table.retire(function) {
                table.recycle(function);
            }
        }
    }
    memory::remove_globals(handle);
    let status = session.post(Op::ImageUnload, &Object { object: handle });
    table.recycle(entry);
    status
}

/// A function of a module, or a kernel of a library, by name: the same handle each time.
pub fn get_function(session: &Session, parent: u64, name: &CStr) -> Status<u64> {
    session.check()?;
    let image = image(parent)?;
    let mut parts = image.parts.lock();
    if let Some(&known) = parts.functions.get(name) {
        return Ok(known);
    }
    let table = if is_library(parent) {
        &KERNELS
    } else {
        &FUNCTIONS
    };
    let entry = table.claim().ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    let body = GetFunction {
        parent,
        function: table.handle_of(entry),
    };
    let answer = session.ask(Op::GetFunction, &body, name.to_bytes_with_nul());
    let read = answer.and_then(|answer| {
        let info: FunctionInfo = answer.read()?;
        let mut params = vec![Param::new_zeroed(); info.params as usize];
        let rest = &answer.payload[size_of::<FunctionInfo>()..];
        let wanted = params.as_mut_bytes();
        if rest.len() < wanted.len() {
            return Err(CUDA_ERROR_MPS_RPC_FAILURE);
        }
        wanted.copy_from_slice(&rest[..wanted.len()]);
        Ok((info, params))
    });
    let (info, params) = match read {
        Ok(read) => read,
        Err(status) => {
            table.recycle(entry);
            return Err(status);
        }
    };
    let prints = info.flags & FUNCTION_PRINTS != 0;
    let Some(layout) = layout(parts.hash, name, params, prints) else {
        table.recycle(entry);
        return Err(CUDA_ERROR_MPS_RPC_FAILURE);
    };
    entry
        .layout
        .store(ptr::from_ref(layout).cast_mut(), Ordering::Release);
    entry
        .context
        .store(image.context.load(Ordering::Acquire), Ordering::Release);
    entry.parent.store(parent, Ordering::Relaxed);
    for (to, from) in entry.attributes.iter().zip(info.attributes) {
        to.store(from, Ordering::Relaxed);
    }
    let handle = table.publish(entry);
    parts.functions.insert(name.to_owned(), handle);
    Ok(handle)
}

/// The layout of a function of some content; `None` for parameters no kernel can have.
fn layout(
    hash: [u8; 32],
    name: &CStr,
    params: Vec<Param>,
    prints: bool,
) -> Option<&'static Layout> {
    type Known = HashMap<([u8; 32], CString), &'static Layout>;
    static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);
    let end = |param: &Param| param.offset as usize + param.size as usize;
    let len = params.iter().map(end).max().unwrap_or(0);
    if len > PARAMS_MAX {
        return None;
    }
    let mut known = KNOWN.lock();
    let layout = known.entry((hash, name.to_owned())).or_insert_with(|| {
        Box::leak(Box::new(Layout {
            name: name.to_owned(),
            params,
            len,
            prints,
        }))
    });
    Some(layout)
}

/// A global of a module or library: address and length.
pub fn get_global(session: &Session, parent: u64, name: &CStr) -> Status<(u64, u64)> {
    session.check()?;
    let image = image(parent)?;
    let mut parts = image.parts.lock();
    if let Some(&known) = parts.globals.get(name) {
        return Ok(known);
    }
    let range: Range = session
        .ask(Op::GetGlobal, &Named { parent }, name.to_bytes_with_nul())?
        .read()?;
    // SAFETY: set before the image was published, to a context, none of which is ever freed.
    let context = unsafe { &*image.context.load(Ordering::Acquire) };
    memory::add_global(
        range.start,
        Global {
            len: range.len,
            image: parent,
            context,
        },
    );
    parts
        .globals
        .insert(name.to_owned(), (range.start, range.len));
    Ok((range.start, range.len))
}

/// The names of all functions of a module or kernels of a library.
pub fn names(session: &Session, parent: u64) -> Status<Vec<CString>> {
    session.check()?;
    image(parent)?;
    let answer = session.ask(Op::EnumerateFunctions, &Named { parent }, &[])?;
    let count: Value = answer.read()?;
    let rest = &answer.payload[size_of::<Value>()..];
    let names: Vec<CString> = rest
        .split_inclusive(|byte| *byte == 0)
        .take(count.value as usize)
        .filter_map(|name| CString::from_vec_with_nul(name.to_vec()).ok())
        .collect();
    if names.len() as u64 != count.value {
        return Err(CUDA_ERROR_MPS_RPC_FAILURE);
    }
    Ok(names)
}

/// `cuFuncGetAttribute`.
pub fn attribute(session: &Session, function: FunctionRef, attribute: u32) -> Status<i32> {
    if let Some(known) = function.known(attribute) {
        session.check()?;
        return Ok(known);
    }
    let body = FunctionAttribute {
        function: function.handle(),
        attribute,
        value: 0,
    };
    let value: Value = session.ask(Op::GetFunctionAttribute, &body, &[])?.read()?;
    Ok(value.value as i32)
}

/// `cuFuncSetAttribute`.
pub fn set_attribute(
    session: &Session,
    function: FunctionRef,
    attribute: u32,
    value: i32,
) -> Status {
    if function.known(attribute) == Some(value) {
        return session.check();
    }
    let body = FunctionAttribute {
        function: function.handle(),
        attribute,
        value,
    };
    session
        .ask(Op::SetFunctionAttribute, &body, &[])?
        .status
        .ok()?;
    if let Some(known) = function.attributes.get(attribute as usize) {
        known.store(value, Ordering::Relaxed);
    }
    Ok(())
}
