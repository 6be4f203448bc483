//! Green contexts and device resources.

use super::Reply;
use crate::engine::base::call::Call;
use crate::engine::base::call_error::CallError;
use crate::engine::base::side::Side;
use crate::engine::gpu::devices::Device;
use crate::engine::gpu::green::{Green, GreenRef};
use crate::engine::gpu::partition::Place;
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use crate::engine::threads::undertaker::Buried;
use mpsshim_api::cuda::*;
use mpsshim_model::limits::Percentage;
use mpsshim_proto::message::Object;
use mpsshim_proto::message::context::MAX_GROUPS;
use mpsshim_proto::message::context::{
    Confine, GreenCreate, ResourceGroups, ResourceJoin, ResourceQuery, ResourceSplit,
};
use std::sync::Arc;
use zerocopy::IntoBytes;

impl Session {
    /// `cuDeviceGetDevResource`, `cuGreenCtxGetDevResource`.
    pub fn resource_query(&mut self, shared: &Shared, body: ResourceQuery) -> Reply {
        let mut resource = CUdevResource::INVALID;
        let driver = &shared.gpu.driver.context;
        let device = if body.green == 0 {
            let device = shared.gpu.device(body.device)?;
            device.make_current(&shared.gpu.driver)?;
            match self.part_of(shared, device)? {
                Some(part) => driver.green_get_dev_resource(part.raw, &mut resource, body.kind)?,
                None => driver.device_get_dev_resource(device.raw, &mut resource, body.kind)?,
            }
            device.ordinal
        } else {
            let green = self.objects.greens.get(body.green)?;
            shared.gpu.devices[green.device].make_current(&shared.gpu.driver)?;
            driver.green_get_dev_resource(green.raw, &mut resource, body.kind)?;
            green.device
        };
        let told = self.objects.resources.tell(resource, device)?;
        Ok(told.as_bytes().to_vec())
    }

    /// `cuDevSmResourceSplitByCount`.
    pub fn resource_split(&mut self, shared: &Shared, body: ResourceSplit) -> Reply {
        let (from, device) = self.objects.resources.get(body.token)?;
        if body.count != from.sm[0] {
            // The program has changed the resource's multiprocessor count, which is read-only.
            return Err(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION.into());
        }
        let mut groups = vec![CUdevResource::INVALID; body.groups.min(MAX_GROUPS) as usize];
        let mut count = groups.len() as u32;
        let mut remaining = CUdevResource::INVALID;
        let groups_at = match body.wanted & 1 {
            0 => std::ptr::null_mut(),
            _ => groups.as_mut_ptr(),
        };
        let remaining_at = match body.wanted & 2 {
            0 => std::ptr::null_mut(),
            _ => &raw mut remaining,
        };
        shared.gpu.devices[device].make_current(&shared.gpu.driver)?;
        shared.gpu.driver.context.split_by_count(
            groups_at,
            &mut count,
            &from,
            remaining_at,
            body.flags,
            body.least,
        )?;
        let mut head = ResourceGroups {
            groups: count,
            ..ResourceGroups::default()
        };
        if remaining.kind == CU_DEV_RESOURCE_TYPE_SM {
            head.remaining = self.objects.resources.tell(remaining, device)?;
        }
        let mut payload = head.as_bytes().to_vec();
        if body.wanted & 1 != 0 {
            for group in groups.iter().take(count as usize) {
                let told = self.objects.resources.tell(*group, device)?;
                payload.extend_from_slice(told.as_bytes());
            }
        }
        Ok(payload)
    }

    /// `cuDevResourceGenerateDesc`.
    pub fn resource_join(&mut self, shared: &Shared, call: Call<'_, ResourceJoin>) -> Reply {
        let Call { body, message } = call;
        let behind = message.behind::<ResourceJoin>()?;
        if body.count == 0 || body.count > MAX_GROUPS {
            return Err(CUDA_ERROR_INVALID_VALUE.into());
        }
        let Some(tokens) = behind.get(..body.count as usize * 4) else {
            return Err(CallError::Violation(format!(
                "{} resources do not fit the message",
                body.count
            )));
        };
        let (words, _) = tokens.as_chunks::<4>();
        let tokens: Vec<u32> = words.iter().map(|word| u32::from_le_bytes(*word)).collect();
        let device = self.objects.resources.get(tokens[0])?.1;
        shared.gpu.devices[device].make_current(&shared.gpu.driver)?;
        let at = self
            .objects
            .resources
            .describe(&shared.gpu.driver, tokens, device)?;
        Ok(super::value(at as u64))
    }

    /// Fails in an annex: a device can be partitioned only in its main context.
    fn check_parts(&self) -> Result<(), CUresult> {
        match self.side {
            Side::MAIN => Ok(()),
            _ => Err(CUDA_ERROR_NOT_SUPPORTED),
        }
    }

    /// `cuGreenCtxCreate`.
    pub fn green_create(&mut self, shared: &Shared, body: GreenCreate) -> Reply {
        self.check_parts()?;
        let device = shared.gpu.device(body.device)?;
        let description = match body.description {
            0 => CUdevResourceDesc::NULL,
            at => self
                .objects
                .resources
                .description(at as usize - 1, device.ordinal)?,
        };
        device.make_current(&shared.gpu.driver)?;
        let mut raw = CUgreenCtx::NULL;
        shared
            .gpu
            .driver
            .context
            .green_create(&mut raw, description, device.raw, body.flags)?;
        let green = Arc::new(Green::of_client(raw, device.ordinal));
        if let Err((status, green)) = self.objects.greens.insert(body.green, green) {
            shared.lanes.bury(Buried::Green(green));
            return Err(status.into());
        }
        Ok(Vec::new())
    }

    /// Assigns a part of a device to one of the client's contexts, under a handle like a green context's. Returns its
    /// number of multiprocessors.
    pub fn confine(&mut self, shared: &Shared, body: Confine) -> Reply {
        self.check_parts()?;
        let device = shared.gpu.device(body.device)?;
        let partition = device.partition(&shared.gpu.driver)?;
        let asked = Percentage::from_hundredths(body.hundredths).unwrap_or(Percentage::ALL);
        let threads = asked.min(self.shared.terms.threads);
        let place = partition.place(threads.of(partition.total));
        let count = place.count;
        let green = place.green(&shared.gpu.driver, device)?;
        self.objects
            .greens
            .insert(body.green, green)
            .map_err(|(status, _)| status)?;
        self.objects.places_of_contexts.insert(body.green, place);
        Ok(super::value(count.into()))
    }

    /// The part of a device that the session may use; `None`: the whole device.
    ///
    /// # Errors
    /// Driver errors.
    pub fn part_of(&self, shared: &Shared, device: &Device) -> Result<Option<GreenRef>, CUresult> {
        let place = self
            .objects
            .places
            .get(device.ordinal.index())
            .and_then(Option::as_ref);
        let green = |place: &Place| place.green(&shared.gpu.driver, device);
        place.map(green).transpose()
    }

    /// `cuGreenCtxDestroy`, once its last stream has drained.
    pub fn green_destroy(&mut self, shared: &Shared, body: Object) -> Result<(), CallError> {
        let green = self.objects.greens.remove(body.object)?;
        self.objects.places_of_contexts.remove(&body.object);
        shared.lanes.bury(Buried::Green(green));
        Ok(())
    }
}
