//! Messages whose driver calls wait for all work in flight: the column *gate* of the operations' table.

use crate::engine::base::call::Incoming;
use crate::engine::calls::context::raises_limit;
use crate::engine::calls::module::{device_of, held_by_client, loads_module};
use crate::engine::objects::streams::clamped;
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_proto::message::image::KernelAttribute;
use mpsshim_proto::message::{FunctionAttribute, GetFunction, Named, Op, StreamCreate};
use mpsshim_proto::ops::Gate;

/// Whether a message makes a driver call that waits for all work in flight and blocks the other sessions meanwhile.
#[inline]
pub fn must_be_alone(session: &mut Session, shared: &Shared, message: Incoming<'_>) -> bool {
    if session.flow.moment.is_some() {
        return false;
    }
    match message.op.gate() {
        Gate::Never => false,
        Gate::Always => true,
        Gate::NewModule => loads_module(session, shared, message),
        Gate::NewFunction => !knows_function(session, shared, message),
        Gate::Variable(at) => loads_for_variable(session, shared, message, at),
        Gate::NewImage => enumerates_unloaded(session, message),
        Gate::HigherLimit => raises_limit(shared, message),
        Gate::KernelAttribute => sets_of_unloaded(session, shared, message),
        Gate::FunctionAttribute => sets_of_other(session, shared, message),
        Gate::NewStream => creates_stream(session, shared, message),
    }
}

fn knows_function(session: &Session, shared: &Shared, message: Incoming<'_>) -> bool {
    let Ok(body) = message.body::<GetFunction>() else {
        return true;
    };
    let Ok(image) = session.objects.image(body.parent) else {
        return true;
    };
    if body.function == 0 {
        return image.is_loaded();
    }
    let name = message.name::<GetFunction>();
    let device = device_of(session, shared, body.parent, body.device);
    match (name, device) {
        (Ok(name), Ok(device)) => image.knows(&(name.into(), device)),
        _ => true,
    }
}

/// Whether taking the address of a variable loads an image: the client then needs a private instance, unless it holds the
/// variable itself.
fn loads_for_variable(
    session: &Session,
    shared: &Shared,
    message: Incoming<'_>,
    handle_at: usize,
) -> bool {
    let image = session.objects.image(message.word(handle_at));
    image.is_ok_and(|image| {
        !image.is_loaded() || image.is_with_others() && !client_may_hold(session, shared, message)
    })
}

fn client_may_hold(session: &Session, shared: &Shared, message: Incoming<'_>) -> bool {
    let (body, name) = (message.body::<Named>(), message.name::<Named>());
    let (Op::GetGlobal, Ok(body), Ok(name)) = (message.op, body, name) else {
        return false;
    };
    let device = device_of(session, shared, body.parent, body.device);
    device.is_ok_and(|device| held_by_client(session, &body, device, &name).is_some())
}

fn sets_of_unloaded(session: &Session, shared: &Shared, message: Incoming<'_>) -> bool {
    let Ok(body) = message.body::<KernelAttribute>() else {
        return false;
    };
    let Ok(library) = session.objects.libraries.get(body.library) else {
        return false;
    };
    if body.set == 0 || !library.is_loaded() {
        return body.set != 0;
    }
    let (name, device) = (
        message.name::<KernelAttribute>(),
        shared.gpu.device(body.device),
    );
    let (Ok(name), Ok(device)) = (name, device) else {
        return false;
    };
    let (key, set) = ((name.into(), device.ordinal), (body.attribute, body.value));
    library.is_tracked() && library.loads_to_take(&shared.images, &key, Some((set, true)))
}

/// Whether setting a function attribute loads another instance, because no existing one has that value.
fn sets_of_other(session: &Session, shared: &Shared, message: Incoming<'_>) -> bool {
    let body = message.body::<FunctionAttribute>();
    let found = body.and_then(|body| {
        let function = session.objects.functions.get(body.function)?;
        let set = (body.attribute, body.value);
        Ok((session.objects.image(function.image)?, &function.key, set))
    });
    found.is_ok_and(|(image, key, set)| {
        image.is_tracked() && image.loads_to_take(&shared.images, key, Some((set, false)))
    })
}

/// Whether a new stream is not served from the streams kept for reuse: the driver may allocate a hardware queue for
/// it.
fn creates_stream(session: &Session, shared: &Shared, message: Incoming<'_>) -> bool {
    let Ok(body) = message.body::<StreamCreate>() else {
        return false;
    };
    let priority = clamped(body.priority);
    let Ok(device) = shared.gpu.device(body.device) else {
        return false;
    };
    let part = session.objects.places.get(device.ordinal.index());
    !match (body.green, part.and_then(Option::as_ref)) {
        (0, None) => device.has_stream(priority),
        (0, Some(part)) => part.has_stream(priority),
        (green, _) => match session.objects.greens.get(green) {
            Ok(green) => green.has_stream(priority),
            Err(_) => true,
        },
    }
}

fn enumerates_unloaded(session: &Session, message: Incoming<'_>) -> bool {
    let body = message.body::<Named>();
    let image = body.and_then(|body| Ok(session.objects.image(body.parent)?));
    image.is_ok_and(|image| !image.is_loaded())
}
