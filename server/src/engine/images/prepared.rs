//! Images received ahead of their load, which waits at the gate.

use crate::engine::base::account::Charge;
use crate::engine::base::call::Incoming;
use crate::engine::base::call_error::CallError;
use crate::engine::gpu::cubin::Calls;
use crate::engine::gpu::managed_image::ManagedImage;
use crate::engine::images::contents::Content;
use mpsshim_proto::message::ImageLoad;

/// An image received ahead of its load, which waits at the gate.
#[derive(Debug)]
pub struct Prepared {
    pub body: ImageLoad,
    pub token: u64,
    pub outcome: Result<Ready, CallError>,
}

impl Prepared {
    pub fn new(
        body: &ImageLoad,
        message: Incoming<'_>,
        outcome: Result<Ready, CallError>,
    ) -> Prepared {
        Prepared {
            body: *body,
            token: message.token,
            outcome,
        }
    }

    pub fn is_for(&self, body: &ImageLoad, message: Incoming<'_>) -> bool {
        self.body == *body && self.token == message.token
    }
}

/// Inputs of a load besides the driver.
#[derive(Debug)]
pub struct Ready {
    pub content: Content,
    pub charge: ImageCharge,
    /// Functions of the driver that its kernels call.
    pub calls: Calls,
    /// Its managed variables, which `content` has in the session's memory, if the message names some.
    pub managed: Option<ManagedImage>,
}

impl Ready {
    /// Whether its managed variables lack memory of the session, so that it is not loaded.
    pub fn lacks_memory(&self, body: &ImageLoad) -> bool {
        self.managed.is_some() && body.managed == 0
    }
}

/// Memory charged for an image.
#[derive(Debug)]
pub struct ImageCharge {
    pub charge: Charge,
    /// The size was determined from its content.
    pub is_whole: bool,
}
