//! Modules and libraries.

use super::reply::{Logged, Reply, number};
use crate::engine::base::account::Memory;
use crate::engine::base::call::{Call, Incoming};
use crate::engine::base::call_error::CallError;
use crate::engine::base::description::Record;
use crate::engine::base::jit::JitOptions;
use crate::engine::base::kinds;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::calls::function::look_ahead;
use crate::engine::gpu::footprint::footprint;
use crate::engine::gpu::managed_image::ManagedImage;
use crate::engine::images::contents::{Content, Raw};
use crate::engine::images::family::Family;
use crate::engine::images::instances::{self, Image};
use crate::engine::images::prepared::{ImageCharge, Prepared, Ready};
use crate::engine::images::variables;
use crate::engine::lasting::{Lasting, Lost, Making, describe, describe_gone};
use crate::engine::objects::functions::{Function, Global};
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::*;
use mpsshim_control::closers::{self, Stranger};
use mpsshim_proto::arena;
use mpsshim_proto::handle::{Handle, Kind};
use mpsshim_proto::handshake::DescriptorNote;
use mpsshim_proto::message::{
    HOLDS_VARIABLES, ImageLoad, ImageLoaded, Named, Object, Op, PlaceGlobal, Range,
};
use std::cell::Cell;
use std::ffi::{CStr, CString};
use std::os::fd::AsFd;
use zerocopy::{FromZeros, IntoBytes};

impl Shared {
    /// Free bytes on a device.
    fn free_memory(&self, device: u32) -> Result<u64, CUresult> {
        self.gpu.device(device)?.make_current(&self.gpu.driver)?;
        let (mut free, mut total) = (0, 0);
        self.gpu.driver.mem_get_info(&mut free, &mut total)?;
        Ok(free as u64)
    }
}

/// `cuModuleLoadDataEx`, `cuLibraryLoadData`, by the kind of the handle.
pub fn image_load(session: &mut Session, shared: &Shared, call: Call<'_, ImageLoad>) -> Logged {
    let Call { body, message } = call;
    let ready = match session.flow.prepared.take() {
        Some(prepared) if prepared.is_for(&body, message) => prepared.outcome?,
        _ => take_in(session, shared, &body, message)?,
    };
    // A load may take long in the driver, so it must not begin after the quiescent point, when other sessions work
    // again.
    let is_late = session
        .flow
        .moment
        .as_ref()
        .is_some_and(|moment| moment.is_over());
    if is_late && session.flow.offered.is_none() && Handle(body.image).kind() != Some(Kind::Library)
    {
        let outcome = Ok(ready);
        session.flow.prepared = Some(Prepared::new(&body, message, outcome));
        return Err(CallError::Alone);
    }
    if ready.lacks_memory(&body) {
        let wanted = ImageLoaded {
            managed: ready.managed.map_or(0, |managed| managed.len()),
            ..ImageLoaded::default()
        };
        return Ok((Err(CUDA_ERROR_NOT_READY), wanted.as_bytes().to_vec()));
    }
    let Ready {
        content,
        mut charge,
        calls,
        managed,
    } = ready;
    let device = shared.gpu.device(body.device)?;
    match Handle(body.image).kind() {
        // A library belongs to no context.
        Some(Kind::Library) => shared.gpu.use_any_device(),
        _ => device.make_current(&shared.gpu.driver)?,
    }
    let behind = message.behind::<ImageLoad>()?;
    let (mut options, _) = JitOptions::read(&behind, body.options).map_err(CallError::Violation)?;
    let family = Family::of(&body, device.ordinal, session.side, &behind);
    let family = family.filter(|_| managed.is_none());
    options.want(body.info_log, body.error_log);
    let before = match charge.is_whole {
        true => None,
        false => Some(shared.free_memory(body.device)?),
    };
    let what = (content.clone(), device.ordinal, calls);
    session.shared.launched.note_image(&content);
    let offered = session.flow.offered.take();
    let (image, payload) =
        Image::load(&shared.images, body.image, what, (family, offered), options);
    let mut image = match image {
        Ok(image) => image,
        Err(status) => return Ok((Err(status), payload)),
    };
    if let Some(before) = before {
        let taken = before.saturating_sub(shared.free_memory(body.device)?);
        let bytes = taken.max(charge.charge.bytes());
        if let Err(status) = charge.charge.resize(bytes) {
            // The image takes memory until it is unloaded, so it is charged beyond the limit.
            charge.charge.grow_to(bytes);
            image.pay(charge.charge);
            shared.images.discard(image);
            return Ok((Err(status), payload));
        }
    }
    image.pay(charge.charge);
    if let Some(managed) = managed {
        let placed = place_managed(
            session,
            shared,
            &mut image,
            (&managed, device.ordinal),
            &body,
        );
        if let Err(status) = placed {
            shared.images.discard(image);
            return Ok((Err(status), payload));
        }
    }
    let table = match image.raw() {
        Raw::Module(_) => &mut session.objects.images,
        Raw::Library(_) => &mut session.objects.libraries,
    };
    if let Err((status, image)) = table.insert(body.image, image) {
        shared.images.discard(image);
        return Ok((Err(status), payload));
    }
    look_ahead(session, shared, body.image, device.ordinal);
    Ok((Ok(()), payload))
}

/// The managed variables of an image, if they can be in the session's memory, and its code with the memory that the
/// message names.
fn with_managed_memory(
    session: &Session,
    shared: &Shared,
    body: &ImageLoad,
    content: Content,
) -> Result<(Content, Option<ManagedImage>), CUresult> {
    let Some(managed) = shared.images.managed_image(&content) else {
        return Ok((content, None));
    };
    if body.managed == 0 {
        return Ok((content, Some(managed)));
    }
    match arena::is_managed(body.managed) {
        true => session.check_device(body.managed, managed.len())?,
        false => session.check_host(body.managed, managed.len())?,
    }
    let code = managed.at(body.managed).ok_or(CUDA_ERROR_NOT_SUPPORTED)?;
    let content = shared.images.store(&code, &session.flow.sent)?;
    Ok((content, Some(managed)))
}

/// Notes where the managed variables of an image are, and gives them their initial values. The session's memory for
/// them has been checked.
fn place_managed(
    session: &mut Session,
    shared: &Shared,
    image: &mut Image,
    (managed, device): (&ManagedImage, Ordinal),
    body: &ImageLoad,
) -> Result<(), CUresult> {
    // Another server would give the variables their initial values again.
    session.lasting.binding_images = true;
    let named = managed.variables.iter().filter_map(|one| {
        let name = CString::new(one.name.as_str()).ok()?;
        Some((name, (body.managed + one.offset, one.len)))
    });
    image.managed = named.collect();
    if body.fresh == 0 {
        return Ok(());
    }
    if arena::is_managed(body.managed) {
        let place = (body.managed, managed.len());
        return variables::store(&shared.gpu, device, place, managed.initial());
    }
    let base = body.managed as *mut u8;
    for (offset, bytes) in managed.initial() {
        // SAFETY: the block is mapped here at the client's addresses for as long as the session has it, and it is long
        // enough. The client may write it meanwhile; the bytes have no invalid values.
        unsafe {
            let to = base.add(offset as usize);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
    }
    Ok(())
}

/// A managed variable of an image that is in the session's memory.
fn managed_variable(session: &Session, image: u64, name: &[u8]) -> Result<Option<Range>, CUresult> {
    let name = CStr::from_bytes_with_nul(name).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
    let found = session.objects.image(image)?.managed.get(name);
    Ok(found.map(|(start, len)| Range {
        start: *start,
        len: *len,
    }))
}

/// Whether [`image_load`] makes the driver load a module: not if a loaded instance can be reused.
/// Libraries are loaded on first use.
pub fn loads_module(session: &mut Session, shared: &Shared, message: Incoming<'_>) -> bool {
    let Ok(body) = message.body::<ImageLoad>() else {
        return false;
    };
    if Handle(body.image).kind() == Some(Kind::Library) {
        return false;
    }
    let (device, options) = (
        shared.gpu.device(body.device),
        message.behind::<ImageLoad>(),
    );
    let (Ok(device), Ok(options)) = (device, options) else {
        return false;
    };
    let family = Family::of(&body, device.ordinal, session.side, &options);
    forget_offer(session, shared);
    // Held until the message is executed, so that the instance is not unloaded meanwhile.
    session.flow.offered =
        family.and_then(|family| shared.images.families.offer(&shared.images, &family));
    session.flow.offered.is_none() && prepare_ahead(session, shared, &body, message)
}

/// Prepares a load before its quiescent point, except for the driver call. Returns whether there is anything to
/// load.
fn prepare_ahead(
    session: &mut Session,
    shared: &Shared,
    body: &ImageLoad,
    message: Incoming<'_>,
) -> bool {
    let done = session
        .flow
        .prepared
        .take_if(|done| done.is_for(body, message));
    let prepared = done.unwrap_or_else(|| {
        session.go_away(&shared.gpu);
        let outcome = take_in(session, shared, body, message);
        session.come_back();
        Prepared::new(body, message, outcome)
    });
    let outcome = prepared.outcome.as_ref();
    let is_ready = outcome.is_ok_and(|ready| !ready.lacks_memory(body));
    session.flow.prepared = Some(prepared);
    is_ready
}

/// Receives the image from the client, and determines the memory that loading it takes.
fn take_in(
    session: &Session,
    shared: &Shared,
    body: &ImageLoad,
    message: Incoming<'_>,
) -> Result<Ready, CallError> {
    let content = match message.token {
        0 => shared
            .images
            .cache
            .get(&body.hash, &session.flow.sent)
            .ok_or(CUDA_ERROR_NOT_FOUND)?,
        token => {
            let fd = receive_descriptor(session, token)?;
            let sent = &session.flow.sent;
            shared
                .images
                .cache
                .receive(fd.as_fd(), body.len, &body.hash, sent)?
        }
    };
    // Only after the descriptor has been received: the next message must find its own.
    let charge = image_charge(session, shared, body.device, &content)?;
    let calls = shared.images.calls(&body.hash, &content);
    let (content, managed) = match calls.managed {
        true => with_managed_memory(session, shared, body, content)?,
        false => (content, None),
    };
    // Analyzes the image in advance, so that the results are there when it is loaded and used.
    if shared.gpu.keeping.is_on() {
        shared.images.leaves(&content);
    }
    shared.images.variables_of(content.hash(), &content);
    Ok(Ready {
        content,
        charge,
        calls,
        managed,
    })
}

/// Returns the offered instance, once it has been used or is not wanted any more.
pub fn forget_offer(session: &mut Session, shared: &Shared) {
    if let Some(offered) = session.flow.offered.take() {
        instances::let_go(&shared.images, offered);
    }
}

/// Charges the memory that an image takes on its device; clients that share it are charged as if each had its own.
/// Its length alone says little: a variable of 512 MiB that begins with zeros takes a few bytes of it. If the
/// content does not reveal the size, the driver's numbers are used, as a last resort, because they may include
/// simultaneous allocations by others.
fn image_charge(
    session: &Session,
    shared: &Shared,
    device: u32,
    content: &Content,
) -> Result<ImageCharge, CUresult> {
    let ordinal = shared.gpu.device(device)?.ordinal;
    let memory = Memory::Device(ordinal);
    let len = content.len() as u64;
    let charge = session.account.take(memory, len)?;
    if session.account.left(memory) == u64::MAX {
        return Ok(ImageCharge {
            charge,
            is_whole: true,
        });
    }
    let arch = shared.gpu.device(device)?.capability;
    let found = footprint(&content[..content.len() - 1], arch);
    let mut all = ImageCharge {
        charge,
        is_whole: found.is_some(),
    };
    all.charge
        .resize(found.map_or(len, |found| found.max(len)))?;
    Ok(all)
}

/// Receives the descriptor that the client sent ahead of the message with this token.
pub fn receive_descriptor(session: &Session, token: u64) -> Result<Stranger, CallError> {
    let mut note = DescriptorNote::new_zeroed();
    let uid = session.shared.info.uid;
    if !closers::has_room(uid) {
        let why = "too many descriptors of its user do not close";
        return Err(CallError::Violation(why.into()));
    }
    let (len, fds) =
        closers::receive(session.shared.socket(), note.as_mut_bytes(), uid).map_err(|error| {
            CallError::Violation(format!("no descriptor for token {token}: {error}"))
        })?;
    let expected = len == size_of::<DescriptorNote>() && note.token == token;
    match (expected, <[Stranger; 1]>::try_from(fds)) {
        (true, Ok([fd])) => Ok(fd),
        _ => Err(CallError::Violation(format!(
            "descriptor packet does not match token {token}"
        ))),
    }
}

/// `cuModuleUnload`, `cuLibraryUnload`: the handles become invalid immediately; the driver's object is unloaded at
/// a quiescent point, because unloading waits for other clients' work.
pub fn image_unload(session: &mut Session, shared: &Shared, body: Object) -> Result<(), CallError> {
    note_left(session, shared, body.object);
    let mut image = match Handle(body.object).kind() {
        Some(Kind::Library) => session.objects.libraries.remove(body.object)?,
        _ => session.objects.images.remove(body.object)?,
    };
    session.end_runs(shared);
    // Programs unload their images one after the other when they end.
    if session.is_drained(&shared.gpu) {
        image.note_drained();
    }
    // Objects found in the image must not be used any more, because the driver is about to destroy them.
    session
        .objects
        .functions
        .retain(|function| function.image != body.object);
    forget_variables(session, |global| global.image == body.object);
    session
        .objects
        .texture_references
        .retain(|reference| reference.image != body.object);
    session
        .objects
        .surface_references
        .retain(|reference| reference.image != body.object);
    if let Some(image) = session.objects.graphs.keep_image(body.object, image) {
        shared.images.discard(image);
    }
    Ok(())
}

/// Notes whether kernels of an image that is about to be unloaded may have stored addresses. The values of its
/// variables end with it.
fn note_left(session: &mut Session, shared: &Shared, handle: u64) {
    let mut functions = session.objects.functions.iter();
    let may_have_run =
        session.flow.counts.launches > 0 && functions.any(|function| function.image == handle);
    let leaves = session
        .objects
        .image(handle)
        .is_ok_and(|image| image.is_loaded() && shared.images.may_leave_addresses(image.content()));
    session.flow.left_images |= may_have_run && leaves;
}

/// Forgets the functions and variables of a library on one device, where the client's context has ended.
pub fn image_leave(session: &mut Session, shared: &Shared, body: Named) -> Result<(), CallError> {
    let over = shared.gpu.device(body.device)?.ordinal;
    session.end_runs(shared);
    note_left(session, shared, body.parent);
    session.objects.libraries.get_mut(body.parent)?.leave(over);
    let left = |image: u64, device: Ordinal| image == body.parent && device == over;
    session
        .objects
        .functions
        .retain(|function| !left(function.image, function.device));
    forget_variables(session, |global| left(global.image, global.device));
    Ok(())
}

/// Forgets variables that the client must not use any more.
fn forget_variables(session: &mut Session, gone: impl Fn(&Global) -> bool) {
    let gone = session
        .objects
        .globals
        .iter()
        .filter(|(_, global)| gone(global));
    let gone: Vec<u64> = gone.map(|(start, _)| *start).collect();
    for start in gone {
        let Some(global) = session.objects.globals.remove(&start) else {
            continue;
        };
        let moved = session
            .lasting
            .moved
            .iter()
            .filter(|(_, (_, now))| *now == start);
        let mut known: Vec<u64> = moved.map(|(known, _)| *known).collect();
        // Another variable may be known by the address at which this one is now.
        if !session.lasting.moved.contains_key(&start) {
            known.push(start);
        }
        for known in known {
            session.objects.graphs.note_freed(known, global.len);
            session.lasting.moved.remove(&known);
            describe_gone::<Variable>(session, known);
        }
    }
    session.note_span();
}

/// Ensures that an image is not shared with other clients. Returns whether it was until now.
///
/// # Errors
/// Driver errors of loading it again.
pub fn separate(session: &mut Session, shared: &Shared, handle: u64) -> Result<bool, CUresult> {
    if !session.objects.image(handle)?.may_be_shared() {
        return Ok(false);
    }
    session.end_runs(shared);
    let moved = session
        .objects
        .image_mut(handle)?
        .separate(&shared.images)?;
    take_again(session, shared, handle)?;
    Ok(moved)
}

/// Takes all known functions of an image from its present instances.
fn take_again(session: &mut Session, shared: &Shared, handle: u64) -> Result<(), CUresult> {
    let image = match Handle(handle).kind() {
        Some(Kind::Library) => session.objects.libraries.get_mut(handle)?,
        _ => session.objects.images.get_mut(handle)?,
    };
    let mine = |function: &&mut Function| function.image == handle;
    for function in session.objects.functions.iter_mut().filter(mine) {
        function.raw = image.take(&shared.images, &function.key)?;
        function.taken = true;
    }
    Ok(())
}

/// The driver's object of a module, or of a library on a device; the device; and whether its kernels print. Makes
/// the device's context current.
pub fn image_ready(
    session: &Session,
    shared: &Shared,
    handle: u64,
    device: u32,
) -> Result<(Raw, Ordinal, bool), CUresult> {
    let image = session.objects.image(handle)?;
    let device = device_of(session, shared, handle, device)?;
    shared.gpu.devices[device].make_current(&shared.gpu.driver)?;
    Ok((image.raw(), device, image.calls.prints))
}

/// The device of a module; for a library, the device that the client names.
pub fn device_of(
    session: &Session,
    shared: &Shared,
    handle: u64,
    device: u32,
) -> Result<Ordinal, CUresult> {
    let image = session.objects.image(handle)?;
    match image.raw() {
        Raw::Module(_) => Ok(image.device),
        Raw::Library(_) => Ok(shared.gpu.device(device)?.ordinal),
    }
}

/// Bytes of a variable that the client may hold in its own memory, and can.
pub fn held_by_client(
    session: &Session,
    body: &Named,
    device: Ordinal,
    name: &[u8],
) -> Option<u64> {
    if body.pad != HOLDS_VARIABLES {
        return None;
    }
    let image = session.objects.image(body.parent).ok()?;
    image.variables(device)?.apart(name)
}

/// `cuModuleGetGlobal`, `cuLibraryGetGlobal`. A variable that has moved keeps the address by which the client knows it.
pub fn get_global(session: &mut Session, shared: &Shared, call: Call<'_, Named>) -> Reply {
    let mut range = find_global(session, shared, call)?;
    range.start = session.lasting.known_as(range.start);
    Ok(range.as_bytes().to_vec())
}

/// The present address of a variable, and its length; address 0 if the client may hold it.
fn find_global(
    session: &mut Session,
    shared: &Shared,
    call: Call<'_, Named>,
) -> Result<Range, CallError> {
    let Call { body, message } = call;
    let name = message.name::<Named>()?;
    let look = |raw: Raw| {
        let (mut start, mut len, name) = (0, 0, name.as_ptr().cast());
        let (driver, start_at, len_at) = (&shared.gpu.driver, &mut start, &mut len);
        match raw {
            Raw::Module(module) => driver.module_get_global(start_at, len_at, module, name)?,
            Raw::Library(library) => driver.library_get_global(start_at, len_at, library, name)?,
        }
        Ok::<_, CUresult>((start, len))
    };
    if let Some(managed) = managed_variable(session, body.parent, &name)? {
        return Ok(managed);
    }
    let find = |session: &Session| {
        let (raw, device, _) = image_ready(session, shared, body.parent, body.device)?;
        let found = look(raw)?;
        let image = session.objects.image(body.parent)?;
        image.note_loaded(&shared.images, device);
        Ok::<_, CUresult>((found, device))
    };
    let (mut found, device) = find(session)?;
    if let Some(len) = held_by_client(session, &body, device, &name) {
        return Ok(Range { start: 0, len });
    }
    if separate(session, shared, body.parent)? {
        (found, _) = find(session)?;
    }
    // A restored session also uses addresses of the previous server, with which new variables must not overlap.
    if session.lasting.kept && is_unused(session, body.parent) {
        for _ in 0..MOST_LOADS {
            if !is_in_the_way(session, (body.parent, device), found) {
                break;
            }
            load_elsewhere(session, shared, body.parent)?;
            (found, _) = find(session)?;
        }
    }
    let (start, len) = found;
    let known = session.objects.globals.get(&start);
    let global = Global {
        len: len as u64,
        image: body.parent,
        device,
        used: Cell::new(known.is_some_and(|known| known.used.get())),
    };
    if session.lasting.kept {
        session.check_new_address(start, global.len)?;
    }
    session.objects.globals.insert(start, global);
    session.note_span();
    if session.lasting.known_as(start) == start {
        describe_variable(session, start, message);
    }
    look_ahead(session, shared, body.parent, device);
    let len = len as u64;
    Ok(Range { start, len })
}

/// Most times that an image is loaded again because the addresses of its variables are taken.
pub const MOST_LOADS: u32 = 4;

/// Whether an image is unused: the client knows none of its variables, and none of its functions was launched, queried or
/// named by a graph. Its variables then have their initial content.
fn is_unused(session: &Session, image: u64) -> bool {
    let mut globals = session.objects.globals.values();
    let mut functions = session.objects.functions.iter();
    !globals.any(|one| one.image == image) && !functions.any(|one| one.image == image && one.asked)
}

/// Whether the variable that was found, or another one of its image, is at an address by which the client knows another
/// variable.
fn is_in_the_way(
    session: &Session,
    (image, device): (u64, Ordinal),
    (start, len): (u64, usize),
) -> bool {
    let variables = session.objects.image(image).ok();
    let variables = variables.and_then(|image| image.variables(device));
    let mut places: Vec<(u64, u64)> = vec![(start, len as u64)];
    places.extend(variables.iter().flat_map(|variables| variables.places()));
    let mut places = places.into_iter();
    places.any(|(start, len)| session.check_new_address(start, len).is_err())
}

/// The images of a restored session with variables that the client does not know yet, at addresses by which it knows others.
pub fn images_in_the_way(session: &Session) -> Vec<u64> {
    if session.lasting.moved.is_empty() {
        return Vec::new();
    }
    let images = session.objects.images.iter_with_handles();
    let all = images.chain(session.objects.libraries.iter_with_handles());
    let is_known = |start: &u64| session.objects.globals.contains_key(start);
    let is_free = |(start, len)| session.check_new_address(start, len).is_ok();
    let in_the_way = all.filter(|(_, image)| {
        let mut places = image.places().into_iter();
        places.any(|place| !is_known(&place.0) && !is_free(place))
    });
    in_the_way.map(|(handle, _)| handle).collect()
}

/// Loads an image of a session that is being restored again, so that its variables have other addresses. The client knows some
/// of them by these records, of which it returns those of the image: their variables are to be looked up again.
///
/// # Errors
/// As [`load_elsewhere`].
pub fn load_restored_elsewhere<'a>(
    session: &mut Session,
    shared: &Shared,
    handle: u64,
    known: impl Iterator<Item = &'a Record>,
) -> Result<Vec<&'a Record>, CUresult> {
    load_elsewhere(session, shared, handle)?;
    let globals = &mut session.objects.globals;
    globals.retain(|_, global| global.image != handle);
    let is_of_it = |record: &&Record| {
        let message = record.state::<<Variable as Lasting>::State>();
        message.is_some_and(|message| {
            let message = Incoming::copied(Op::GetGlobal, 0, &message);
            let call: Result<Call<'_, Named>, _> = message.decode();
            call.is_ok_and(|call| call.body.parent == handle)
        })
    };
    let of_it: Vec<&Record> = known.filter(is_of_it).collect();
    for record in &of_it {
        session.lasting.moved.remove(&record.key);
    }
    session.note_span();
    Ok(of_it)
}

/// Loads an unused image again, so that its variables have other addresses.
///
/// # Errors
/// As [`Image::load_elsewhere`](crate::engine::images::instances::Image::load_elsewhere).
fn load_elsewhere(session: &mut Session, shared: &Shared, handle: u64) -> Result<(), CUresult> {
    let image = session.objects.image_mut(handle)?;
    image.load_elsewhere(&shared.images)?;
    take_again(session, shared, handle)
}

/// Stores the initial content of a variable that no code uses in memory of the session, where the client holds it from now
/// on. The image's own variable still has that content, since the client has not learned its address.
pub fn place_global(session: &mut Session, shared: &Shared, call: Call<'_, PlaceGlobal>) -> Reply {
    let Call { body, message } = call;
    let name = message.name::<PlaceGlobal>()?;
    let device = device_of(session, shared, body.parent, body.device)?;
    if shared.gpu.devices.of_address(body.start) != Some(device) {
        return Err(CUDA_ERROR_INVALID_VALUE.into());
    }
    session.check_device(body.start, body.len)?;
    let variables = session.objects.image(body.parent)?.variables(device);
    let variables = variables.ok_or(CUDA_ERROR_NOT_FOUND)?;
    let place = (body.start, body.len);
    variables.place(&shared.gpu, device, &name, place)?;
    Ok(Vec::new())
}

/// `cuLibraryGetManaged`. The driver's managed memory is in this process only: of such a variable, the address is 0.
pub fn get_managed(session: &mut Session, shared: &Shared, call: Call<'_, Named>) -> Reply {
    let Call { body, message } = call;
    let name = message.name::<Named>()?;
    let Raw::Library(library) = session.objects.libraries.get(body.parent)?.raw() else {
        return Err(CUDA_ERROR_INVALID_HANDLE.into());
    };
    if let Some(managed) = managed_variable(session, body.parent, &name)? {
        return Ok(managed.as_bytes().to_vec());
    }
    shared.gpu.use_any_device();
    let (mut start, mut len) = (0, 0);
    let name = name.as_ptr().cast();
    let image = &shared.gpu.driver.image;
    image.library_get_managed(&mut start, &mut len, library, name)?;
    let len = len as u64;
    Ok(Range { start: 0, len }.as_bytes().to_vec())
}

/// `cuModuleEnumerateFunctions`, `cuLibraryEnumerateKernels`: the number of functions, and their names.
pub fn enumerate_functions(session: &mut Session, shared: &Shared, body: Named) -> Reply {
    let image = session.objects.image(body.parent)?;
    match image.raw() {
        Raw::Module(_) => shared.gpu.devices[image.device].make_current(&shared.gpu.driver)?,
        Raw::Library(_) => shared.gpu.use_any_device(),
    }
    let names = image.names(&shared.images)?;
    let mut payload = number(names.len() as u64);
    for name in names {
        payload.extend_from_slice(name.to_bytes_with_nul());
    }
    Ok(payload)
}

/// The message that told the client the address of a variable.
pub struct Variable;

impl Lasting for Variable {
    const KIND: kinds::Kind = kinds::Kind::Variable;
    type State = Vec<u8>;

    /// Looks the variable up again. If its address differs from the client's, addresses are translated from then on.
    fn make(
        record: &Record,
        message: Vec<u8>,
        session: &mut Session,
        making: &mut Making<'_>,
    ) -> Result<(), Lost> {
        let message = Incoming::copied(Op::GetGlobal, 0, &message);
        let mut found = || -> Result<Range, CallError> {
            let mut call: Call<'_, Named> = message.decode()?;
            // The client knows an address of the image's own variable.
            call.body.pad = 0;
            find_global(session, making.shared, call)
        };
        let range = found().map_err(|error| format!("a variable at {:#x}: {error}", record.key))?;
        if range.start != record.key {
            let moved = &mut session.lasting.moved;
            moved.insert(record.key, (range.len, range.start));
            session.note_span();
        }
        Ok(())
    }
}

/// Describes a variable of which the client learned the address by this message.
pub fn describe_variable(session: &mut Session, start: u64, message: Incoming<'_>) {
    describe::<Variable>(session, start, &message.whole());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::calls::alone::must_be_alone;
    use crate::engine::testing::{
        FAULT, Fixture, Function as Symbol, counts, obeys, obeys_with_handle, others, records,
        sealed,
    };
    use mpsshim_model::bonds::Bonds;
    use mpsshim_proto::message::Op;
    use std::ffi::c_char;
    use std::fs::File;

    const KINDS: [Kind; 2] = [Kind::Module, Kind::Library];
    const NAME: &[u8] = b"variable\0";

    fn named(parent: u64) -> Named {
        Named {
            parent,
            ..Named::default()
        }
    }

    fn images(test: &Fixture) -> usize {
        test.session.objects.images.len() + test.session.objects.libraries.len()
    }

    #[test]
    fn content_that_cannot_be_an_image_is_not_given_to_the_driver() {
        let mut test = Fixture::new(&[
            ("cuModuleLoadDataEx", counts as Symbol),
            ("cuLibraryLoadData", counts as Symbol),
        ]);
        let open = || File::open("/proc/self/exe").expect("a file").into();
        for kind in KINDS {
            let good = test.load(kind);
            assert_eq!(
                test.status(Op::ImageLoad, &ImageLoad { device: 1, ..good }, &[]),
                CUDA_ERROR_INVALID_DEVICE
            );
            let len = good.len;
            let text = || sealed(b".version 8.0");
            for (file, len, hash) in [
                (text(), 0, good.hash),
                (text(), len + 1, good.hash),
                (text(), u64::MAX, good.hash),
                (text(), len, [0; 32]),
                (sealed(b".version 8.1"), len, good.hash),
                (open(), len, good.hash),
            ] {
                test.sends(file);
                let body = ImageLoad { len, hash, ..good };
                let status = test.status(Op::ImageLoad, &body, &[]);
                assert_eq!(status, CUDA_ERROR_INVALID_IMAGE, "{len}");
            }
            // Without a descriptor the server's copy is meant, and there is none.
            let status = test.status(Op::ImageLoad, &good, &[]);
            assert_eq!(status, CUDA_ERROR_NOT_FOUND);
        }
        assert_eq!((test.calls(), test.held(), images(&test)), (0, 0, 0));
    }

    #[test]
    fn bytes_that_are_no_image_are_not_given_to_the_driver() {
        use sha2::{Digest, Sha256};
        let mut test = Fixture::new(&[("cuModuleLoadDataEx", counts as Symbol)]);
        for content in [
            &[0; 16][..],
            b"\x7fELF, and no more",
            &0x4662_43b1u32.to_le_bytes(),
        ] {
            let body = ImageLoad {
                hash: Sha256::digest(content).into(),
                len: content.len() as u64,
                ..test.load(Kind::Module)
            };
            // The descriptor that `load` sent is for another load.
            let _ = receive_descriptor(&test.session, 7);
            test.sends(sealed(content));
            let status = test.status(Op::ImageLoad, &body, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_IMAGE, "{content:x?}");
        }
        assert_eq!((test.calls(), test.held(), images(&test)), (0, 0, 0));
    }

    #[test]
    fn a_load_without_its_descriptor_or_its_options_breaks_the_protocol() {
        let mut test = Fixture::new(&[("cuModuleLoadDataEx", counts as Symbol)]);
        let good = test.load(Kind::Module);
        for options in [1, u32::MAX] {
            let body = ImageLoad { options, ..good };
            test.load(Kind::Module);
            assert!(test.is_violation(Op::ImageLoad, &body, &[]), "{options}");
        }
        let _ = receive_descriptor(&test.session, 7);
        test.claims_descriptor();
        assert!(test.is_violation(Op::ImageLoad, &good, &[]));
        assert_eq!((test.calls(), test.held(), images(&test)), (0, 0, 0));
    }

    #[test]
    fn an_image_counts_and_is_refused_beyond_the_limit() {
        let mut test = Fixture::new(&[("cuModuleLoadDataEx", counts as Symbol)]);
        test.limit(10);
        let body = test.load(Kind::Module);
        let status = test.status(Op::ImageLoad, &body, &[]);
        assert_eq!((status, test.calls()), (CUDA_ERROR_OUT_OF_MEMORY, 0));
        assert_eq!((test.held(), images(&test)), (0, 0));
    }

    #[test]
    fn an_image_that_the_driver_does_not_load_leaves_nothing_behind() {
        for (kind, name) in [
            (Kind::Module, "cuModuleLoadDataEx"),
            (Kind::Library, "cuLibraryLoadData"),
        ] {
            let mut test = Fixture::new(&[(name, obeys_with_handle as Symbol)]);
            test.orders(CUDA_ERROR_NO_BINARY_FOR_GPU);
            let body = test.load(kind);
            let status = test.told(Op::ImageLoad, &body, &[]);
            assert_eq!(status, CUDA_ERROR_NO_BINARY_FOR_GPU, "{name}");
            assert_eq!((test.held(), images(&test)), (0, 0), "{name}");
            test.orders(CUDA_SUCCESS);
            test.image(kind);
            assert_eq!((test.held(), images(&test)), (body.len + 1, 1), "{name}");
            test.orders(FAULT);
            let body = test.load(kind);
            assert_eq!(test.told(Op::ImageLoad, &body, &[]), FAULT, "{name}");
            assert!(test.has_ended(), "{name}");
        }
    }

    #[test]
    fn an_image_whose_handle_is_taken_is_unloaded_again() {
        for kind in KINDS {
            let mut test = Fixture::new(&[]);
            let known = test.image(kind);
            let held = test.held();
            let body = ImageLoad {
                image: known,
                ..test.load(kind)
            };
            let status = test.status(Op::ImageLoad, &body, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{kind:?}");
            assert_eq!(images(&test), 1);
            assert_eq!(test.held(), 2 * held, "it is still the driver's");
            assert_eq!((test.buried(), test.held()), (1, held), "{kind:?}");
        }
    }

    #[test]
    fn with_an_image_all_that_was_found_in_it_is_gone() {
        for kind in KINDS {
            let mut test = Fixture::new(&[]);
            let image = test.image(kind);
            let function = test.function_of(image);
            let start: u64 = test.reply(Op::GetGlobal, &named(image), NAME).expect("it");
            assert!(test.owns(start), "{kind:?}");
            let elsewhere = test.image(kind);
            let stays = test.function_of(elsewhere);
            for object in others(image) {
                let status = test.status(Op::ImageUnload, &Object { object }, &[]);
                assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{object:#x}");
            }
            let body = Object { object: image };
            assert_eq!(test.status(Op::ImageUnload, &body, &[]), CUDA_SUCCESS);
            let status = test.status(Op::ImageUnload, &body, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{kind:?}");
            assert!(test.session.objects.functions.get(function).is_err());
            assert!(test.session.objects.functions.get(stays).is_ok());
            assert!(!test.owns(start), "{kind:?}");
            assert_eq!(test.buried(), 1, "{kind:?}");
        }
    }

    #[test]
    fn a_library_is_left_on_one_device() {
        let mut test = Fixture::with_devices(2, &[]);
        let library = test.image(Kind::Library);
        let mut variables = [0; 2];
        for (device, start) in (0..).zip(&mut variables) {
            let body = Named {
                device,
                ..named(library)
            };
            *start = test.reply(Op::GetGlobal, &body, NAME).expect("a variable");
        }
        for parent in others(library) {
            let status = test.status(Op::ImageLeave, &named(parent), &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{parent:#x}");
        }
        let nowhere = Named {
            device: 2,
            ..named(library)
        };
        let status = test.status(Op::ImageLeave, &nowhere, &[]);
        assert_eq!(status, CUDA_ERROR_INVALID_DEVICE);
        assert_eq!(
            test.status(Op::ImageLeave, &named(library), &[]),
            CUDA_SUCCESS
        );
        assert!(!test.owns(variables[0]));
        assert!(test.owns(variables[1]));
    }

    #[test]
    fn a_variable_is_of_an_image_of_the_session() {
        let mut test = Fixture::new(&[
            ("cuModuleGetGlobal_v2", counts as Symbol),
            ("cuLibraryGetGlobal", counts as Symbol),
            ("cuLibraryGetManaged", counts as Symbol),
        ]);
        let (module, library) = (test.image(Kind::Module), test.image(Kind::Library));
        for image in [module, library] {
            assert!(test.is_violation(Op::GetGlobal, &named(image), b"variable"));
            for parent in others(image) {
                let status = test.status(Op::GetGlobal, &named(parent), NAME);
                assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{parent:#x}");
            }
        }
        let nowhere = Named {
            device: 1,
            ..named(library)
        };
        let status = test.status(Op::GetGlobal, &nowhere, NAME);
        assert_eq!(status, CUDA_ERROR_INVALID_DEVICE);
        assert!(test.is_violation(Op::GetManaged, &named(library), b"variable"));
        let status = test.status(Op::GetManaged, &named(module), NAME);
        assert_eq!(status, CUDA_ERROR_INVALID_HANDLE);
        assert_eq!((test.calls(), test.session.objects.globals.len()), (0, 0));
    }

    /// A variable of 64 bytes, at an address that depends on the driver's image.
    extern "C" fn by_image(start: &mut u64, len: &mut usize, image: u64, _: u64) -> CUresult {
        (*start, *len) = (image << 20, 64);
        CUDA_SUCCESS
    }

    /// A session that has moved knows variables by addresses of the server before.
    #[test]
    fn an_image_whose_variables_are_in_the_way_is_loaded_elsewhere() {
        let address = |raw: Raw| match raw {
            Raw::Module(module) => module.0 << 20,
            Raw::Library(library) => library.0 << 20,
        };
        for kind in KINDS {
            for is_used in [false, true] {
                let mut test = Fixture::new(&[
                    ("cuModuleGetGlobal_v2", by_image as Symbol),
                    ("cuLibraryGetGlobal", by_image as Symbol),
                ]);
                // Without logs, so that it may be loaded again.
                let body = ImageLoad {
                    info_log: 0,
                    error_log: 0,
                    ..test.load(kind)
                };
                assert_eq!(test.status(Op::ImageLoad, &body, &[]), CUDA_SUCCESS);
                let image = body.image;
                let function = test.function_of(image);
                let place =
                    |test: &Fixture| address(test.session.objects.image(image).expect("it").raw());
                let first = place(&test);
                let before = test
                    .session
                    .objects
                    .functions
                    .get(function)
                    .expect("it")
                    .raw;
                test.session.lasting.kept = true;
                let elsewhere = (64, 0x5000_0000_0000);
                test.session.lasting.moved.insert(first + 32, elsewhere);
                if is_used {
                    let known = test.session.objects.functions.get_mut(function);
                    known.expect("it").asked = true;
                    let status = test.status(Op::GetGlobal, &named(image), NAME);
                    assert_eq!((status, place(&test)), (CUDA_ERROR_NOT_SUPPORTED, first));
                    continue;
                }
                let start: u64 = test.reply(Op::GetGlobal, &named(image), NAME).expect("it");
                assert_eq!(start, place(&test));
                assert_ne!(place(&test), first, "{kind:?}");
                let function = test.session.objects.functions.get(function).expect("it");
                assert_ne!(function.raw, before, "{kind:?}");
            }
        }
    }

    /// One variable of a session that has moved is at the address by which its client knows another one.
    #[test]
    fn a_variable_that_is_where_another_one_was_goes_alone() {
        let mut test = Fixture::new(&[("cuModuleGetGlobal_v2", by_image as Symbol)]);
        let [first, second] = [(); 2].map(|()| test.image(Kind::Module));
        let [at, known]: [u64; 2] = [first, second]
            .map(|image| test.reply(Op::GetGlobal, &named(image), NAME).expect("it"));
        let moved = |test: &mut Fixture, from: u64, to: u64| {
            let global = test.session.objects.globals.remove(&from).expect("it");
            test.session.objects.globals.insert(to, global);
        };
        // The second one was at `at` in the server before, the first one at `before`.
        let before = 0x5000_0000_0000;
        moved(&mut test, known, 0x5100_0000_0000);
        let elsewhere = [(before, (64, at)), (at, (64, 0x5100_0000_0000))];
        test.session.lasting.moved.extend(elsewhere);
        let again: u64 = test
            .reply(Op::GetGlobal, &named(first), NAME)
            .expect("the first one");
        assert_eq!(again, before, "it keeps its address");
        assert_eq!(
            test.status(Op::ImageUnload, &Object { object: first }, &[]),
            CUDA_SUCCESS
        );
        let left: Vec<u64> = test.session.lasting.moved.keys().copied().collect();
        assert_eq!(left, [at]);
        assert_eq!(
            test.session
                .check_device(test.session.lasting.place_of(at), 64),
            Ok(())
        );
    }

    /// Two variables of 64 bytes, one behind the other, at an address that depends on the driver's image.
    extern "C" fn by_name(
        start: &mut u64,
        len: &mut usize,
        image: u64,
        name: *const c_char,
    ) -> CUresult {
        // SAFETY: a name with its NUL.
        let is_other = unsafe { CStr::from_ptr(name) } == c"other";
        (*start, *len) = ((image << 20) + 64 * u64::from(is_other), 64);
        CUDA_SUCCESS
    }

    /// The client knows one of two variables, and the other one is where it knows a third one.
    #[test]
    fn a_restored_image_whose_unknown_variables_are_in_the_way_is_loaded_elsewhere() {
        for kind in KINDS {
            let mut test = Fixture::new(&[
                ("cuModuleGetGlobal_v2", by_name as Symbol),
                ("cuLibraryGetGlobal", by_name as Symbol),
            ]);
            test.session.lasting.kept = true;
            let image = data_with_logs(&mut test, kind, 0);
            let first: u64 = test.reply(Op::GetGlobal, &named(image), NAME).expect("it");
            assert!(images_in_the_way(&test.session).is_empty());
            let elsewhere = (64, 0x5000_0000_0000);
            test.session.lasting.moved.insert(first + 100, elsewhere);
            assert_eq!(images_in_the_way(&test.session), [image], "{kind:?}");
            let mut records = test.session.shared.description.records();
            records.retain(|record| record.kind == kinds::Kind::Variable);
            let (shared, session) = (test.shared.clone(), &mut test.session);
            let again = load_restored_elsewhere(session, &shared, image, records.iter());
            let keys: Vec<u64> = again.expect("loaded").iter().map(|one| one.key).collect();
            assert_eq!(keys, [first]);
            assert!(
                !session
                    .objects
                    .globals
                    .values()
                    .any(|one| one.image == image)
            );
            assert!(images_in_the_way(session).is_empty());
        }
    }

    /// A module or a library with two variables of 64 bytes and no code.
    fn data(test: &mut Fixture, kind: Kind) -> u64 {
        data_with_logs(test, kind, 1)
    }

    fn data_with_logs(test: &mut Fixture, kind: Kind, info_log: u32) -> u64 {
        use sha2::{Digest, Sha256};
        const DATA: &[u8] =
            b".version 8.0\n.global .b8 variable[64];\n.global .b8 other[64] = {5, 6};";
        let _ = test.load(kind);
        let _ = receive_descriptor(&test.session, 7);
        test.sends(sealed(DATA));
        let body = ImageLoad {
            image: test.new_handle(kind),
            hash: Sha256::digest(DATA).into(),
            len: DATA.len() as u64,
            info_log,
            ..ImageLoad::new_zeroed()
        };
        assert_eq!(test.status(Op::ImageLoad, &body, &[]), CUDA_SUCCESS);
        body.image
    }

    #[test]
    fn a_variable_that_no_code_uses_is_held_by_a_client_that_can() {
        for kind in KINDS {
            let mut test = Fixture::new(&[("cuMemsetD8Async", records as Symbol)]);
            let image = data(&mut test, kind);
            let asks = Named {
                pad: HOLDS_VARIABLES,
                ..named(image)
            };
            let found: Range = test.reply(Op::GetGlobal, &asks, NAME).expect("it");
            assert_eq!((found.start, found.len), (0, 64), "{kind:?}");
            assert!(test.session.objects.globals.is_empty());
            let start = test.memory(2 << 20);
            let place = PlaceGlobal {
                parent: image,
                start,
                len: 64,
                ..PlaceGlobal::default()
            };
            assert_eq!(test.told(Op::PlaceGlobal, &place, NAME), CUDA_SUCCESS);
            let recorded = test.recorded();
            assert_eq!(recorded.len(), 1, "{kind:?}");
            assert_eq!(recorded[0][..3], [start, 0, 64]);
            assert!(test.session.objects.globals.is_empty());
            // Its address is memory like any other: it binds to nothing.
            assert!(test.owns(start));
            assert!(test.session.lasting.saved.bonds().is_empty());
            // A client that cannot, as those of earlier releases.
            let real: u64 = test.reply(Op::GetGlobal, &named(image), NAME).expect("it");
            assert!(real != 0 && test.owns(real), "{kind:?}");
            assert_eq!(test.session.lasting.saved.bonds(), Bonds::VARIABLES);
            assert_eq!(test.session.objects.globals.len(), 1);
        }
    }

    /// `cuModuleGetGlobal` of the variables of unused.sm_90.cubin.
    extern "C" fn of_cubin(
        start: &mut u64,
        len: &mut usize,
        _: u64,
        name: *const c_char,
    ) -> CUresult {
        // SAFETY: a name that ends with NUL, as the driver's function expects.
        let name = unsafe { CStr::from_ptr(name) };
        (*start, *len) = match name.to_bytes() {
            b"counter" => (0x7f00_0000_1000, 4),
            b"limits" => (0x7f00_0000_2000, 32),
            _ => return CUDA_ERROR_NOT_FOUND,
        };
        CUDA_SUCCESS
    }

    #[test]
    fn images_stay_shared_while_clients_hold_their_variables() {
        use sha2::{Digest, Sha256};
        const CUBIN: &[u8] =
            include_bytes!("../../../../tests/fixtures/variables/unused.sm_90.cubin");
        const NAME: &[u8] = b"limits\0";
        let mut test = Fixture::new(&[("cuModuleGetGlobal_v2", of_cubin as Symbol)]);
        let images = [(); 2].map(|()| {
            test.sends(sealed(CUBIN));
            let body = ImageLoad {
                image: test.new_handle(Kind::Module),
                hash: Sha256::digest(CUBIN).into(),
                len: CUBIN.len() as u64,
                ..ImageLoad::new_zeroed()
            };
            assert_eq!(test.status(Op::ImageLoad, &body, &[]), CUDA_SUCCESS);
            body.image
        });
        let asks = |parent, pad| Named {
            parent,
            pad,
            ..Named::default()
        };
        let is_alone = |test: &mut Fixture, body: Named| {
            let bytes = [body.as_bytes(), NAME].concat();
            let message = Incoming::copied(Op::GetGlobal, 0, &bytes);
            must_be_alone(&mut test.session, &test.shared, message)
        };
        let is_shared = |test: &Fixture, image| {
            let image = test.session.objects.image(image).expect("an image");
            image.is_with_others()
        };
        for image in images {
            assert!(is_shared(&test, image));
            assert!(!is_alone(&mut test, asks(image, HOLDS_VARIABLES)));
            let body = asks(image, HOLDS_VARIABLES);
            let found: Range = test.reply(Op::GetGlobal, &body, NAME).expect("it");
            assert_eq!((found.start, found.len), (0, 32));
            assert!(is_shared(&test, image));
        }
        assert!(is_alone(&mut test, asks(images[0], 0)));
        let found: Range = test
            .reply(Op::GetGlobal, &asks(images[0], 0), NAME)
            .expect("it");
        assert_eq!((found.start, found.len), (0x7f00_0000_2000, 32));
        assert!(!is_shared(&test, images[0]));
    }

    #[test]
    fn a_variable_is_placed_in_memory_of_the_session_or_not_at_all() {
        let mut test = Fixture::with_devices(2, &[("cuMemsetD8Async", counts as Symbol)]);
        let image = data(&mut test, Kind::Module);
        let (start, elsewhere) = (test.memory(2 << 20), test.memory_of(1, 2 << 20));
        let pinned = test.pinned(4096);
        let good = PlaceGlobal {
            parent: image,
            start,
            len: 64,
            ..PlaceGlobal::default()
        };
        let status = |test: &mut Fixture, body: PlaceGlobal, name: &[u8]| {
            test.status(Op::PlaceGlobal, &body, name)
        };
        for start in [0, 8, elsewhere, pinned, start + (2 << 20) - 32, u64::MAX] {
            let refused = status(&mut test, PlaceGlobal { start, ..good }, NAME);
            assert_eq!(refused, CUDA_ERROR_INVALID_VALUE, "{start:#x}");
        }
        for len in [0, 63, 65] {
            let refused = status(&mut test, PlaceGlobal { len, ..good }, NAME);
            assert_eq!(refused, CUDA_ERROR_NOT_FOUND, "{len}");
        }
        assert_eq!(status(&mut test, good, b"nothing\0"), CUDA_ERROR_NOT_FOUND);
        for parent in others(image) {
            let refused = status(&mut test, PlaceGlobal { parent, ..good }, NAME);
            assert_eq!(refused, CUDA_ERROR_INVALID_HANDLE, "{parent:#x}");
        }
        assert!(test.is_violation(Op::PlaceGlobal, &good, b"variable"));
        // One with code.
        let parent = test.image(Kind::Module);
        let refused = status(&mut test, PlaceGlobal { parent, ..good }, NAME);
        assert_eq!(refused, CUDA_ERROR_NOT_FOUND);
        let asks = Named {
            pad: HOLDS_VARIABLES,
            ..named(parent)
        };
        let real: u64 = test.reply(Op::GetGlobal, &asks, NAME).expect("it");
        assert_ne!(real, 0);
        assert_eq!(test.calls(), 0);
    }

    #[test]
    fn a_variable_that_the_driver_does_not_find_is_not_the_sessions() {
        for (op, kind, name) in [
            (Op::GetGlobal, Kind::Module, "cuModuleGetGlobal_v2"),
            (Op::GetGlobal, Kind::Library, "cuLibraryGetGlobal"),
            (Op::GetManaged, Kind::Library, "cuLibraryGetManaged"),
        ] {
            let mut test = Fixture::new(&[(name, obeys as Symbol)]);
            let body = named(test.image(kind));
            for (status, ends) in [(CUDA_ERROR_NOT_FOUND, false), (FAULT, true)] {
                test.orders(status);
                assert_eq!(test.told(op, &body, NAME), status, "{name}");
                assert_eq!(test.session.objects.globals.len(), 0, "{name}");
                assert_eq!(test.has_ended(), ends, "{name} {status}");
            }
        }
    }

    extern "C" fn two(count: &mut u32) -> CUresult {
        *count = 2;
        CUDA_SUCCESS
    }

    /// `cuFuncGetName`, unless ordered otherwise.
    extern "C" fn name(name: &mut *const c_char) -> CUresult {
        *name = c"kernel".as_ptr();
        obeys()
    }

    #[test]
    fn the_functions_of_an_image_are_listed_or_the_drivers_error_is_told() {
        let (module, library) = (
            [
                "cuModuleGetFunctionCount",
                "cuModuleEnumerateFunctions",
                "cuFuncGetName",
            ],
            [
                "cuLibraryGetKernelCount",
                "cuLibraryEnumerateKernels",
                "cuKernelGetName",
            ],
        );
        for (kind, names) in [(Kind::Module, module), (Kind::Library, library)] {
            for failing in names {
                let mut functions = vec![(names[0], two as Symbol), (names[2], name as Symbol)];
                if failing != names[2] {
                    functions.insert(0, (failing, obeys as Symbol));
                }
                let mut test = Fixture::new(&functions);
                let body = named(test.image(kind));
                test.orders(CUDA_ERROR_NOT_SUPPORTED);
                let status = test.status(Op::EnumerateFunctions, &body, &[]);
                assert_eq!(status, CUDA_ERROR_NOT_SUPPORTED, "{failing}");
                for parent in others(body.parent) {
                    let status = test.status(Op::EnumerateFunctions, &named(parent), &[]);
                    assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{parent:#x}");
                }
                test.orders(CUDA_SUCCESS);
                if failing != names[0] {
                    let count = test.reply::<u64>(Op::EnumerateFunctions, &body, &[]);
                    assert_eq!(count, Ok(2), "{failing}");
                    assert_eq!(&test.answer()[8..], b"kernel\0kernel\0");
                }
            }
        }
    }
}
