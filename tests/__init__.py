from tests.helpers.plugins import register_plugins

register_plugins()
