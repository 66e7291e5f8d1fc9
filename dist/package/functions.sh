# Functions of the packages' scripts: tools/package/build puts them in the place of @FUNCTIONS@.

say() { echo "sockeye: $*" >&2; }

# same_root reports whether / is the root of process 1. It is in another mount namespace of the system, and is not in a
# chroot, whose host's agent and pins are those of another installation.
same_root() { [ "$(stat -Lc %d:%i /proc/1/root/. 2>/dev/null)" = "$(stat -Lc %d:%i /)" ]; }

# warn_about_sources names files of an installation from source, which precede those of the package.
warn_about_sources() {
	for file in /usr/local/bin/sockeye /etc/systemd/system/sockeye.service; do
		if [ -e "$file" ]; then
			say "$file takes precedence over this package; remove the installation from source (make uninstall)"
		fi
	done
}

# install_policy writes a policy that does nothing, if there is none. The policy is no configuration file of the package:
# everybody replaces it, and each change of the default would be a question. It returns 1 if there can be no policy, and
# exits if it cannot be written; $1 is the command that continues then.
install_policy() {
	dir=/etc/sockeye policy=/etc/sockeye/policy.yaml wrong=
	if [ ! -d "$dir" ] && { [ -e "$dir" ] || [ -L "$dir" ]; }; then
		wrong="$dir is no directory"
	elif [ ! -f "$policy" ] && { [ -e "$policy" ] || [ -L "$policy" ]; }; then
		wrong="$policy is no file"
	elif [ -e "$policy" ]; then
		return 0
	# Renamed when it is complete: a full disk leaves no empty policy.
	elif mkdir -p "$dir" && new=$(mktemp "$policy.XXXXXXXXXX") && cp /usr/share/sockeye/policy.yaml "$new" && chmod 644 "$new" && mv -T "$new" "$policy"; then
		return 0
	else
		[ -z "${new-}" ] || rm -f "$new"
		say "$policy could not be written; correct the reason, then: $1"
		exit 1
	fi
	say "the agent was not started, because $wrong; correct it, then: install -D -m 644 /usr/share/sockeye/policy.yaml $policy; systemctl restart sockeye"
	return 1
}

# check_policy reports whether the agent would start: it would not with a policy that it refuses.
check_policy() {
	if ! "$1" check /etc/sockeye/policy.yaml >/dev/null; then
		say "the agent was not restarted; correct /etc/sockeye/policy.yaml, then: systemctl restart sockeye"
		return 1
	fi
}

# revert_all ends steering, and reverts the other changes of the host. Without the package, nobody could.
revert_all() {
	if ! "$1" reset >/dev/null; then
		say "the package is not removed, because its changes of the host could not be reverted"
		return 1
	fi
}
