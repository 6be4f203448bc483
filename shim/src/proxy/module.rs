//! Modules and the functions in them.
//!
//! A module belongs to a context; a library ([`crate::proxy::library`]) is a module in each context that uses it. A
//! function's parameter layout comes with the function, once, so that a launch packs its parameters without a request.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::ptr;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering};

use mpsshim_api::cuda::{
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CUDA_ERROR_INVALID_VALUE,
    CUDA_ERROR_MPS_RPC_FAILURE, CUDA_ERROR_NOT_FOUND, CUDA_ERROR_NOT_PERMITTED,
    CUDA_ERROR_NOT_READY, CUDA_ERROR_OPERATING_SYSTEM, CUDA_ERROR_OUT_OF_MEMORY,
};
use mpsshim_proto::handle::Kind;
use mpsshim_proto::message::{
    FUNCTION_PRINTS, FUNCTION_SYSTEM_SCOPE, FunctionAttribute, FunctionInfo, GetFunction,
    HOLDS_VARIABLES, ImageLoad, Named, Object, Op, PARAMS_MAX, Param, PlaceGlobal, Range, Value,
};
use mpsshim_proto::shm;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use zerocopy::{FromZeros, IntoBytes};

use crate::ffi::Status;
use crate::proxy::context::{self, Context};
use crate::proxy::jit::{Parsed, Said};
use crate::proxy::library;
use crate::proxy::managed;
use crate::proxy::memory::{self, Global};
use crate::proxy::objects::{Entry, Table};
use crate::proxy::submit::Session;

/// Images up to this many bytes are sent without asking first whether the server has them.
const SEND_UNASKED: usize = 64 << 10;

/// Every module and function of the process.
static MODULES: Table<Image> = Table::new(Kind::Module);
static FUNCTIONS: Table<Function> = Table::new(Kind::Function);

/// A function and its handle.
pub type FunctionRef = &'static Entry<Function>;

/// A module.
#[derive(Debug, Default)]
pub struct Image {
    context: AtomicPtr<Context>,
    parts: Mutex<Parts>,
}

#[derive(Debug, Default)]
struct Parts {
    /// Its handle on the server: the module's own, or a library's.
    server: u64,
    /// The library whose module it is, else 0.
    library: u64,
    hash: [u8; 32],
    functions: HashMap<CString, u64>,
    globals: HashMap<CString, (u64, u64)>,
    /// Memory of its managed variables, 0 if it has none.
    managed: u64,
    /// Device memory of the process that holds variables of it.
    placed: Vec<u64>,
}

/// A function of a module.
#[derive(Debug, Default)]
pub struct Function {
    layout: AtomicPtr<Layout>,
    context: AtomicPtr<Context>,
    parent: AtomicU64,
    /// `CU_FUNC_ATTRIBUTE_*` 0 to 15; `i32::MIN` where it has to be requested.
    attributes: [AtomicI32; 16],
    /// Initial values of `attributes`.
    first: [AtomicI32; 16],
    /// Bits of the attributes set by `cuFuncSetAttribute`, which `cuKernelSetAttribute` does not change any more.
    own: AtomicU32,
    /// Number of times that attributes were set.
    revision: AtomicU32,
}

/// Immutable facts about a function. One for each content and name, kept for the life of the process.
#[derive(Debug)]
pub struct Layout {
    pub name: CString,
    pub params: Vec<Param>,
    /// Bytes of all parameters.
    pub len: usize,
    /// `FUNCTION_*`.
    flags: u32,
}

impl Layout {
    /// Whether launching it may print.
    #[inline]
    pub fn prints(&self) -> bool {
        self.flags & FUNCTION_PRINTS != 0
    }

    /// Whether its code may access memory with system scope, so that the host may exchange values with it while it runs.
    #[inline]
    pub fn system_scope(&self) -> bool {
        self.flags & FUNCTION_SYSTEM_SCOPE != 0
    }
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
    /// Handle of its module.
    pub fn parent(&self) -> u64 {
        self.parent.load(Ordering::Relaxed)
    }
    /// Whether an attribute is the function's own, not its kernel's.
    #[inline]
    pub fn is_own(&self, attribute: u32) -> bool {
        attribute < 32 && self.own.load(Ordering::Relaxed) >> attribute & 1 != 0
    }
    /// Initial value of an attribute, if it is known.
    pub fn first(&self, attribute: u32) -> Option<i32> {
        let value = self.first.get(attribute as usize)?;
        Some(value.load(Ordering::Relaxed)).filter(|value| *value != i32::MIN)
    }
    /// Changes when attributes are set, on which occupancy may depend.
    #[inline]
    pub fn revision(&self) -> u32 {
        self.revision.load(Ordering::Relaxed)
    }
    /// An attribute that is known here.
    #[inline]
    pub fn known(&self, attribute: u32) -> Option<i32> {
        let value = self.attributes.get(attribute as usize)?;
        Some(value.load(Ordering::Relaxed)).filter(|value| *value != i32::MIN)
    }
}

/// The function of a `CUfunction`, or of a `CUkernel` in the current context.
#[inline]
pub fn function(handle: u64) -> Status<FunctionRef> {
    match FUNCTIONS.get(handle) {
        Some(function) => Ok(function),
        None => library::function(library::kernel(handle)?, context::current()?),
    }
}

/// As [`function`], with a kernel resolved in the given context.
#[inline]
pub fn function_in(handle: u64, context: &'static Context) -> Status<FunctionRef> {
    match FUNCTIONS.get(handle) {
        Some(function) => Ok(function),
        None => library::function(library::kernel(handle)?, context),
    }
}

/// The function of a `CUfunction`, unless it has ended.
#[inline]
pub fn live_function(handle: u64) -> Option<FunctionRef> {
    FUNCTIONS.get(handle)
}

/// Marks a module as ended with its context.
pub fn ends_with_context(handle: u64) {
    MODULES.ends_with_context(handle);
}

/// Checks that a module exists. `CUDA_ERROR_INVALID_HANDLE`; `CUDA_ERROR_CONTEXT_IS_DESTROYED` if it ended with its
/// context.
pub fn check(handle: u64) -> Status {
    image(handle).map(drop)
}

/// The module of a handle.
fn image(handle: u64) -> Status<&'static Entry<Image>> {
    MODULES.find(handle)
}

impl Image {
    /// The context it is in.
    pub fn context(&self) -> &'static Context {
        // SAFETY: set before the module is published, to a context, none of which is ever freed.
        unsafe { &*self.context.load(Ordering::Acquire) }
    }
}

/// An image and how it is to be loaded.
#[derive(Clone, Copy, Debug)]
pub struct Load<'a> {
    pub content: &'a [u8],
    pub options: &'a Parsed,
}

impl Load<'_> {
    /// Makes the server load it under a handle, for a device. `said` gets the compiler's output, successful or not. Returns
    /// the address of the memory that holds its managed variables, 0 if it has none.
    pub fn send(
        &self,
        session: &Session,
        handle: u64,
        hash: [u8; 32],
        device: u32,
        said: &mut Said,
    ) -> Status<u64> {
        *said = Said::default();
        let status = self.send_with(session, handle, hash, (device, 0), said);
        let len = said.managed();
        if status != Err(CUDA_ERROR_NOT_READY) || len == 0 {
            return status.map(|()| 0);
        }
        let managed = memory::alloc_of_image(session, device, len)?;
        match self.send_with(session, handle, hash, (device, managed), said) {
            Ok(()) => Ok(managed),
            Err(status) => {
                let _ = memory::host_give_back(session, managed);
                Err(status)
            }
        }
    }

    fn send_with(
        &self,
        session: &Session,
        handle: u64,
        hash: [u8; 32],
        (device, managed): (u32, u64),
        said: &mut Said,
    ) -> Status {
        let body = ImageLoad {
            image: handle,
            hash,
            len: self.content.len() as u64,
            options: self.options.count,
            device,
            info_log: self.options.info_log,
            error_log: self.options.error_log,
            managed,
            fresh: (managed != 0).into(),
            pad: 0,
        };
        let options = &self.options.bytes;
        let known = if self.content.len() > SEND_UNASKED {
            let answer = session.request(Op::ImageLoad, &body, options);
            match answer {
                Ok(answer) if answer.status == CUDA_ERROR_NOT_FOUND => None,
                other => Some(other),
            }
        } else {
            None
        };
        let sent = || {
            let file = sealed(self.content)?;
            let len = self.content.len() as u64;
            session.request_sending(Op::ImageLoad, &body, options, file.as_fd(), len)
        };
        let mut answer = known.unwrap_or_else(sent)?;
        if answer.status == CUDA_ERROR_OUT_OF_MEMORY && memory::give_back_unused(session) {
            answer = sent()?;
        }
        *said = Said::read(&answer.payload);
        answer.status.ok()
    }
}

/// As [`Load::send`], for content that the server has, and with managed variables as they are.
pub fn load_known(
    session: &Session,
    handle: u64,
    (hash, len): ([u8; 32], u64),
    (count, options): (u32, &[u8]),
    (device, managed): (u32, u64),
) -> Status {
    let body = ImageLoad {
        image: handle,
        hash,
        len,
        options: count,
        device,
        info_log: 0,
        error_log: 0,
        managed,
        fresh: 0,
        pad: 0,
    };
    memory::request_with_room(session, Op::ImageLoad, &body, options)?
        .status
        .ok()
}

/// A sealed memory file with this content.
pub fn sealed(content: &[u8]) -> Status<File> {
    let file = shm::sealed_memfd(c"image", content.len() as u64).map_err(|error| {
        tracing::error!(%error, "no memory file for an image");
        CUDA_ERROR_OPERATING_SYSTEM
    })?;
    let mut file = File::from(file);
    file.write_all(content)
        .map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
    Ok(file)
}

/// SHA-256 of an image, which identifies it.
pub fn hash_of(content: &[u8]) -> [u8; 32] {
    Sha256::digest(content).into()
}

/// Loads a module into a context: its handle, and the compiler's output, successful or not.
pub fn load(session: &Session, context: &'static Context, load: Load<'_>) -> (Status<u64>, Said) {
    let mut said = Said::default();
    let status = load_module(session, context, load, &mut said);
    (status, said)
}

fn load_module(
    session: &Session,
    context: &'static Context,
    load: Load<'_>,
    said: &mut Said,
) -> Status<u64> {
    let hash = hash_of(load.content);
    let entry = MODULES.claim().ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    let handle = MODULES.handle_of(entry);
    match load.send(session, handle, hash, context.server_device, said) {
        Ok(managed) => {
            let module = publish(entry, context, handle, 0, hash);
            entry.parts.lock().managed = managed;
            Ok(module)
        }
        Err(status) => {
            MODULES.recycle(entry);
            Err(status)
        }
    }
}

fn publish(
    entry: &Entry<Image>,
    context: &'static Context,
    server: u64,
    library: u64,
    hash: [u8; 32],
) -> u64 {
    entry
        .context
        .store(ptr::from_ref(context).cast_mut(), Ordering::Release);
    *entry.parts.lock() = Parts {
        server,
        library,
        hash,
        ..Parts::default()
    };
    let handle = MODULES.publish(entry);
    context.own_image(handle);
    handle
}

/// Creates the module of a library in a context; `server` is its handle on the server.
pub fn of_library(
    context: &'static Context,
    server: u64,
    library: u64,
    hash: [u8; 32],
) -> Status<u64> {
    let entry = MODULES.claim().ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    Ok(publish(entry, context, server, library, hash))
}

/// `cuModuleUnload`. A library's module is only unloaded with the library.
pub fn unload(session: &Session, handle: u64) -> Status {
    if image(handle)?.parts.lock().library != 0 {
        return Err(CUDA_ERROR_NOT_PERMITTED);
    }
    end(session, handle)
}

/// Ends a module with its functions.
pub fn end(session: &Session, handle: u64) -> Status {
    let entry = MODULES
        .retire(handle)
        .ok_or_else(|| MODULES.absent(handle))?;
    let context = entry.context();
    context.forget_image(handle);
    let parts = std::mem::take(&mut *entry.parts.lock());
    for function in parts.functions.into_values() {
        if let Some(function) = FUNCTIONS.retire(function) {
            FUNCTIONS.recycle(function);
        }
    }
    memory::remove_globals(handle);
    let status = if parts.library == 0 {
        session.submit(Op::ImageUnload, &Object { object: handle })
    } else {
        library::leave(session, parts.library, parts.server, context)
    };
    MODULES.recycle(entry);
    managed::free_of_image(session, parts.managed);
    memory::free_of_variables(session, &parts.placed);
    status
}

/// A function of a module, if it was requested before.
pub fn known(module: u64, name: &CStr) -> Option<FunctionRef> {
    let handle = *MODULES.get(module)?.parts.lock().functions.get(name)?;
    FUNCTIONS.get(handle)
}

/// The kernel of a library from which a function was made: a `CUkernel`, or 0 for a module's own function.
pub fn kernel_of(function: FunctionRef) -> u64 {
    let Ok(image) = image(function.parent()) else {
        return 0;
    };
    let library = image.parts.lock().library;
    library::named(library, &function.layout().name).unwrap_or(0)
}

/// A function of a module by name: the same handle each time.
pub fn get_function(session: &Session, module: u64, name: &CStr) -> Status<u64> {
    session.check()?;
    let image = image(module)?;
    let mut parts = image.parts.lock();
    if let Some(&known) = parts.functions.get(name) {
        return Ok(known);
    }
    let entry = FUNCTIONS.claim().ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    let context = image.context();
    let body = GetFunction {
        parent: parts.server,
        function: FUNCTIONS.handle_of(entry),
        device: context.server_device,
        pad: 0,
    };
    let (info, layout) = match request_function(session, &body, parts.hash, name) {
        Ok(read) => read,
        Err(status) => {
            FUNCTIONS.recycle(entry);
            return Err(status);
        }
    };
    entry
        .layout
        .store(ptr::from_ref(layout).cast_mut(), Ordering::Release);
    entry
        .context
        .store(ptr::from_ref(context).cast_mut(), Ordering::Release);
    entry.parent.store(module, Ordering::Relaxed);
    for (to, from) in entry.attributes.iter().zip(info.attributes) {
        to.store(from, Ordering::Relaxed);
    }
    for (to, from) in entry.first.iter().zip(info.attributes) {
        to.store(from, Ordering::Relaxed);
    }
    entry.own.store(0, Ordering::Relaxed);
    let handle = FUNCTIONS.publish(entry);
    parts.functions.insert(name.to_owned(), handle);
    Ok(handle)
}

/// Requests a function, or the description of a kernel, and its layout.
pub fn request_function(
    session: &Session,
    body: &GetFunction,
    hash: [u8; 32],
    name: &CStr,
) -> Status<(FunctionInfo, &'static Layout)> {
    let answer = session.request(Op::GetFunction, body, name.to_bytes_with_nul())?;
    let info: FunctionInfo = answer.read()?;
    let mut params = vec![Param::new_zeroed(); info.params as usize];
    let rest = &answer.payload[size_of::<FunctionInfo>()..];
    let wanted = params.as_mut_bytes();
    if rest.len() < wanted.len() {
        return Err(CUDA_ERROR_MPS_RPC_FAILURE);
    }
    wanted.copy_from_slice(&rest[..wanted.len()]);
    let layout = layout(hash, name, params, info.flags).ok_or(CUDA_ERROR_MPS_RPC_FAILURE)?;
    Ok((info, layout))
}

/// The layout of a function of some content; `None` for parameters no kernel can have.
fn layout(hash: [u8; 32], name: &CStr, params: Vec<Param>, flags: u32) -> Option<&'static Layout> {
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
            flags,
        }))
    });
    Some(layout)
}

/// The server's handle of a module, and its context.
pub fn on_server(module: u64) -> Status<(u64, &'static Context)> {
    let image = image(module)?;
    let server = image.parts.lock().server;
    Ok((server, image.context()))
}

/// A global of a module: address and length.
pub fn get_global(session: &Session, module: u64, name: &CStr) -> Status<(u64, u64)> {
    session.check()?;
    let image = image(module)?;
    let context = image.context();
    let mut parts = image.parts.lock();
    if let Some(&known) = parts.globals.get(name) {
        return Ok(known);
    }
    let range = find_global(session, context, &mut parts, name)?;
    if managed::block(range.start).is_none() {
        memory::add_global(
            range.start,
            Global {
                len: range.len,
                image: module,
                context,
            },
        );
    }
    parts
        .globals
        .insert(name.to_owned(), (range.start, range.len));
    Ok((range.start, range.len))
}

/// Where a global is, from the server. If no code uses it, it gets memory of this process, which is the same in the next
/// server. Without such memory it is where the driver has put it.
fn find_global(
    session: &Session,
    context: &'static Context,
    parts: &mut Parts,
    name: &CStr,
) -> Status<Range> {
    let (parent, device) = (parts.server, context.server_device);
    let name = name.to_bytes_with_nul();
    let ask = |pad| {
        let body = Named {
            parent,
            device,
            pad,
        };
        session.request(Op::GetGlobal, &body, name)?.read::<Range>()
    };
    let range = ask(HOLDS_VARIABLES)?;
    if range.start != 0 {
        return Ok(range);
    }
    let place = |start| {
        let body = PlaceGlobal {
            parent,
            start,
            len: range.len,
            device,
            pad: 0,
        };
        session.request(Op::PlaceGlobal, &body, name)?.status.ok()
    };
    let placed = memory::alloc_of_variable(session, context, range.len).and_then(|start| {
        place(start).inspect_err(|_| memory::give_back_of_variable(session, start))?;
        Ok(start)
    });
    match placed {
        Ok(start) => {
            parts.placed.push(start);
            Ok(Range { start, ..range })
        }
        Err(status) => {
            tracing::debug!(%status, len = range.len, "a variable stays in its image");
            ask(0)
        }
    }
}

/// The names of all functions of a module.
pub fn names(session: &Session, module: u64) -> Status<Vec<CString>> {
    session.check()?;
    let server = image(module)?.parts.lock().server;
    names_in(session, server)
}

/// The names of all functions or kernels of an image, by its handle on the server.
pub fn names_in(session: &Session, server: u64) -> Status<Vec<CString>> {
    let body = Named {
        parent: server,
        device: 0,
        pad: 0,
    };
    let answer = session.request(Op::EnumerateFunctions, &body, &[])?;
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
    let value: Value = session
        .request(Op::GetFunctionAttribute, &body, &[])?
        .read()?;
    Ok(value.value as i32)
}

/// `cuFuncSetAttribute`.
pub fn set_own_attribute(
    session: &Session,
    function: FunctionRef,
    attribute: u32,
    value: i32,
) -> Status {
    set_attribute(session, function, attribute, value)?;
    if attribute < 32 {
        function.own.fetch_or(1 << attribute, Ordering::Relaxed);
    }
    Ok(())
}

/// `CUDA_ERROR_INVALID_VALUE` for an attribute that the compiler determines.
pub fn check_settable(attribute: u32) -> Status {
    if attribute < CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    Ok(())
}

/// Sets an attribute of a function, as its own or as its kernel's.
pub fn set_attribute(
    session: &Session,
    function: FunctionRef,
    attribute: u32,
    value: i32,
) -> Status {
    check_settable(attribute)?;
    if function.known(attribute) == Some(value) {
        return session.check();
    }
    let body = FunctionAttribute {
        function: function.handle(),
        attribute,
        value,
    };
    session
        .request(Op::SetFunctionAttribute, &body, &[])?
        .status
        .ok()?;
    if let Some(known) = function.attributes.get(attribute as usize) {
        known.store(value, Ordering::Relaxed);
    }
    function.revision.fetch_add(1, Ordering::Relaxed);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_says_what_launches_may_do() {
        for (number, flags) in [
            0,
            FUNCTION_PRINTS,
            FUNCTION_SYSTEM_SCOPE,
            FUNCTION_PRINTS | FUNCTION_SYSTEM_SCOPE,
        ]
        .into_iter()
        .enumerate()
        {
            let known = layout([number as u8; 32], c"kernel", Vec::new(), flags).expect("a layout");
            assert_eq!(known.prints(), flags & FUNCTION_PRINTS != 0);
            assert_eq!(known.system_scope(), flags & FUNCTION_SYSTEM_SCOPE != 0);
        }
    }
}
