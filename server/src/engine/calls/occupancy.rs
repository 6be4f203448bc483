//! Occupancy.

use super::Reply;
use crate::engine::base::call::Call;
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::CUstream;
use mpsshim_proto::message::{Launch, Occupancy};

impl Session {
    /// `cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags`, `cuOccupancyAvailableDynamicSMemPerBlock`.
    pub fn occupancy(&mut self, shared: &Shared, body: Occupancy) -> Reply {
        let function = self.function_ready(shared, body.function)?;
        if body.kind == 0 {
            let mut blocks = 0;
            shared.gpu.driver.occupancy_max_active_blocks(
                &mut blocks,
                function,
                body.block,
                body.shared as usize,
                body.flags,
            )?;
            Ok(super::value(blocks as u64))
        } else {
            let mut bytes = 0;
            shared.gpu.driver.occupancy_available_shared(
                &mut bytes,
                function,
                body.shared as i32,
                body.block,
            )?;
            Ok(super::value(bytes as u64))
        }
    }

    /// `cuOccupancyMaxActiveClusters`, `cuOccupancyMaxPotentialClusterSize`.
    pub fn clusters(&mut self, shared: &Shared, call: Call<'_, Launch>) -> Reply {
        let Call { body, message } = call;
        let function = self.function_ready(shared, body.function)?;
        let attributes = self.attributes(message, &body, None)?;
        let device = self.objects.functions.get(body.function)?.device;
        let driver = &shared.gpu.driver;
        // The result depends on the multiprocessors of the stream.
        let part = self.part_of(shared, &shared.gpu.devices[device])?;
        let stream = match &part {
            Some(part) => part.take_stream(driver, 0)?,
            None => CUstream::NULL,
        };
        let config = attributes.config(&body, stream);
        let mut clusters = 0;
        let answered = if body.flags == 0 {
            driver.occupancy_max_active_clusters(&mut clusters, function, &config)
        } else {
            driver.occupancy_max_cluster_size(&mut clusters, function, &config)
        };
        if let Some(part) = part {
            part.end_stream(driver, 0, stream);
        }
        answered?;
        Ok(super::value(clusters as u64))
    }
}
