//! Converts the configuration into the options of the parts of the daemon, and derives paths from it.

use super::{
    Config, EngineSetting, Handler, HostNamespaces, ImageSettings, JailSettings, PathSettings, PrivilegedPods,
    RegistrySettings, SandboxSettings,
};
use nacelle_base::machine::EngineKind;
use std::path::{Path, PathBuf};

impl Config {
    /// Returns the top-level keys whose values differ in `other`, without `log`, which can change while the daemon runs.
    pub fn keys_that_differ(&self, other: &Config) -> Vec<String> {
        let values = |config| match serde_json::to_value(config) {
            Ok(serde_json::Value::Object(values)) => values,
            // Keys of the configuration are strings.
            _ => serde_json::Map::new(),
        };
        let (own, others) = (values(self), values(other));
        own.into_iter()
            .filter(|(key, value)| key != "log" && others.get(key) != Some(value))
            .map(|(key, _)| key)
            .collect()
    }

    /// Returns the handler of this name (empty: the default one), with its name in the file.
    pub fn handler(&self, name: &str) -> Option<(&str, &Handler)> {
        let name = if name.is_empty() { &self.default_handler } else { name };
        self.handlers.get_key_value(name).map(|(name, handler)| (name.as_str(), handler))
    }

    /// Returns whether pods may run without a guest: those of a handler with engine host, and those of any handler that the settings for
    /// namespaces of the node and for privileged pods send there.
    pub fn may_run_on_host(&self) -> bool {
        self.sandbox.host_namespaces == HostNamespaces::RunOnHost
            || self.sandbox.privileged == PrivilegedPods::RunOnHost
            || self.handlers.values().any(|handler| handler.engine == EngineSetting::Host)
    }

    /// Returns the options of the image store. `unpack` is the program that decodes layers.
    pub fn image_options(&self, unpack: &Path) -> nacelle_image::ImageStoreConfig {
        let images = &self.images;
        let registry = |registry: &RegistrySettings| nacelle_image::RegistryConfig {
            http: registry.http,
            skip_tls_verify: registry.skip_tls_verify,
            ca_file: registry.ca_file.clone(),
            client_certificate: registry.client_certificate(),
            mirrors: registry.mirrors.clone(),
            auth_file: registry.auth_file.clone(),
        };
        let proxy = images.proxy(|name| std::env::var(name).ok());
        // The value may contain a password and is left out of the message.
        if let Err((scheme, rule)) = proxy.check() {
            tracing::warn!(
                "pulls by {scheme} will fail: the proxy of the environment or of images.{scheme}_proxy is refused: {rule}"
            );
        }
        nacelle_image::ImageStoreConfig {
            registries: images.registries.iter().map(|(host, with)| (host.clone(), registry(with))).collect(),
            proxy,
            parallel_layers: images.parallel_layers,
            progress_timeout: images.progress_timeout,
            max_layer_bytes: images.max_layer_bytes,
            max_layer_entries: images.max_layer_entries,
            max_unpack_memory: images.max_unpack_memory,
            pinned: images.pinned.clone(),
            worker: nacelle_image::ImageWorkerConfig {
                program: unpack.to_owned(),
                seccomp: self.jail.seccomp,
                // Without root the worker has a user namespace of its own, in which there is only one user.
                user: self.jail.worker_user().filter(|_| nix::unistd::geteuid().is_root()),
                ..nacelle_image::ImageWorkerConfig::default()
            },
        }
    }

    /// Returns the options of the streaming server.
    pub fn streaming_options(&self) -> nacelle_stream::StreamingConfig {
        let streaming = &self.streaming;
        let files = streaming.tls_cert_file.clone().zip(streaming.tls_key_file.clone());
        nacelle_stream::StreamingConfig {
            address: streaming.address,
            idle: streaming.idle_timeout,
            tls: files.map(|(certificate, key)| nacelle_stream::Tls { certificate, key, client_authority: None }),
        }
    }

    /// Returns the options of the pod network.
    pub fn network_options(&self) -> nacelle_net::NetConfig {
        nacelle_net::NetConfig {
            conf_dir: self.network.cni_conf_dir.clone(),
            bin_dirs: self.network.cni_bin_dirs.clone(),
            cache_dir: self.paths.root.join("cni"),
            netns_dir: self.network.netns_dir.clone(),
            plugin_deadline: self.network.plugin_timeout,
        }
    }
}

impl EngineSetting {
    /// Returns the engine; `fitting` is the one for `Auto`.
    pub fn or(self, fitting: EngineKind) -> EngineKind {
        match self {
            EngineSetting::Auto => fitting,
            EngineSetting::Kvm => EngineKind::Kvm,
            EngineSetting::Qemu => EngineKind::Qemu,
            EngineSetting::Host => EngineKind::Host,
        }
    }
}

impl JailSettings {
    /// Returns the user of image workers: the first of the range.
    pub fn worker_user(&self) -> Option<u32> {
        (self.user_count > 0).then_some(self.first_user)
    }

    /// Returns the first user of pod processes, and their number: the rest of the range.
    pub fn pod_users(&self) -> (u32, u32) {
        (self.first_user.saturating_add(1), self.user_count.saturating_sub(1))
    }
}

impl ImageSettings {
    /// Returns the proxies of requests to registries: the configured ones, otherwise those of the environment.
    pub(super) fn proxy(&self, variable: impl Fn(&str) -> Option<String>) -> nacelle_image::ProxyConfig {
        let environment = nacelle_image::ProxyConfig::from_environment(variable);
        nacelle_image::ProxyConfig {
            http_proxy: self.http_proxy.clone().unwrap_or(environment.http_proxy),
            https_proxy: self.https_proxy.clone().unwrap_or(environment.https_proxy),
            no_proxy: self.no_proxy.clone().unwrap_or(environment.no_proxy),
        }
    }
}

impl RegistrySettings {
    /// Returns the files of the client certificate, if both are set.
    pub(super) fn client_certificate(&self) -> Option<nacelle_image::ClientCertificate> {
        let files = self.client_cert_file.clone().zip(self.client_key_file.clone());
        files.map(|(certificate, key)| nacelle_image::ClientCertificate { certificate, key })
    }
}

impl SandboxSettings {
    /// Returns `boot_timeout` in milliseconds, the unit of the pod process's specification.
    pub fn boot_timeout_ms(&self) -> u64 {
        u64::try_from(self.boot_timeout.as_millis()).unwrap_or(u64::MAX)
    }
}

impl PathSettings {
    /// Returns the directory of the image store.
    pub fn images(&self) -> PathBuf {
        self.root.join("images")
    }

    /// Returns the path of the state store.
    pub fn store(&self) -> PathBuf {
        self.root.join("state.redb")
    }

    /// Returns the directory of the pods' run directories: sockets, records and scratch disks.
    pub fn pods(&self) -> PathBuf {
        self.run.join("pods")
    }

    /// Returns the directory of the templates of VMs.
    pub fn templates(&self) -> PathBuf {
        self.run.join("templates")
    }

    /// Returns the directory of the checkpoints that pods can name, which has a directory for each namespace.
    pub fn checkpoints(&self) -> PathBuf {
        self.root.join("checkpoints")
    }

    /// Returns the directory of the persistent VMs.
    pub fn machines(&self) -> PathBuf {
        self.root.join("machines")
    }

    /// Returns the directory with the data of persistent VMs whose records were lost.
    pub fn lost_machines(&self) -> PathBuf {
        self.root.join("lost-machines")
    }

    /// Returns the directory of the scratch disks' templates.
    pub fn scratch(&self) -> PathBuf {
        self.root.join("scratch")
    }
}
